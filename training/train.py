"""Train a drafter (Hydra).

    specdec train target.path=... data.path=... out=...

Every setting is in conf/train.yaml and its groups; `specdec train --cfg job` prints them all.
"""

import json
import shlex
import sys
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from omegaconf import DictConfig, OmegaConf

from specdec import own, ranks
from specdec.api import DEMO_TARGET
from specdec.cli.files import no_empty_folder, output_folder, write_text
from specdec.cli.lock import only_writer
from specdec.cli.revision import revision
from specdec.drafters.formats import as_saved, family_of, load_drafter, save_drafter
from specdec.drafters.formats.convert import SERVERS, without_a_form
from specdec.drafters.formats.recipe import FAMILY
from specdec.engine.engine import Engine
from specdec.machine import set_matmul_precision
from specdec.model.ends import load_ends
from specdec.model.language_model import LanguageModel
from specdec.model.loader import load_target
from specdec.training.build import build_drafter, instantiate
from specdec.training.data import Batches, hold_out, load_samples
from specdec.training.data.shards import begun_on
from specdec.training.features.feature_cache import FeatureCache
from specdec.training.features.online import online_features
from specdec.training.features.signature import data_signature
from specdec.training.loop.checkpoint import check_same_run, checkpoints
from specdec.training.loop.evaluate import HELDOUT
from specdec.training.loop.log import check_loggers
from specdec.training.loop.parallel import Processes, Sums, join_processes
from specdec.training.loop.settings import MANY, OnPolicy, TrainerConfig
from specdec.training.loop.trainer import Trainer
from specdec.trees import Chain, DynamicTree


def read_settings(kind: type, config: DictConfig | None, where: str):
    """A dataclass of settings from the part `where` of the configuration; null means the defaults."""
    try:
        return kind(**({} if config is None else cast(dict, OmegaConf.to_container(config, resolve=True))))
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from None


def check_folder(out: Path, resume: bool) -> None:
    """Make the folder of a run. Raises ValueError if it holds a run with a checkpoint that is not to be resumed."""
    if checkpoints(out) and not resume:
        raise ValueError(f"{out} holds a run already: give resume=true or auto to go on with it, or another out=")
    output_folder(out)


def record(config: DictConfig, out: Path, resume: bool) -> None:
    """Write config.yaml: resolved settings, versions and revision. Empty the log unless the run continues."""
    made_by = f"torch {torch.__version__}, transformers {transformers.__version__}, revision {revision() or 'unknown'}"
    write_text(out / "config.yaml", f"# {made_by}\n" + OmegaConf.to_yaml(config, resolve=True))
    if not resume:
        write_text(out / "log.jsonl", "")


def all_settings(config: DictConfig) -> tuple[TrainerConfig, OnPolicy]:
    """Raises ValueError for a setting that is unknown or out of range."""
    trainer = read_settings(TrainerConfig, config.trainer, "trainer")
    check_loggers(trainer.loggers)
    return trainer, read_settings(OnPolicy, config.data.on_policy, "data.on_policy")


def without_layers(config: DictConfig, trainer: TrainerConfig, on_policy: OnPolicy) -> TrainerConfig:
    """Return the settings of a run without the target's layers. Raises ValueError for a setting that needs them."""
    if not config.data.cache:
        raise ValueError(
            "whole_target=false leaves the target's layers out: give data.cache, the folder of specdec train cache"
        )
    if on_policy.share > 0 or trainer.prompts not in (None, HELDOUT):
        raise ValueError("whole_target=false decodes nothing: leave out data.on_policy and trainer.prompts")
    print("note: whole_target=false: tau is not decoded, only expected from the held-out features", file=sys.stderr)
    return replace(trainer, prompts=None, decode_every=None)


def load_some(config: DictConfig, device: str, whole: bool, tp_plan: str | None = None):
    """The target that the settings name, or its ends alone if not `whole`."""
    set_matmul_precision(config.target.matmul_precision)
    name = config.target.path or DEMO_TARGET
    how: dict[str, Any] = {"dtype": config.target.dtype, "device": device}
    places: dict[str, Any] = {"tp_plan": tp_plan, "device_map": config.target.device_map}
    if whole:
        return load_target(name, **how, **places)
    if any(places.values()):
        raise ValueError("tp_plan and target.device_map place a target's layers, and here only its ends are loaded")
    return load_ends(name, **how)


def assemble(config: DictConfig, processes: Processes) -> Trainer:
    """A run, ready for its first step. Nothing is written yet."""
    trainer_config, on_policy = all_settings(config)
    if not config.whole_target:
        trainer_config = without_layers(config, trainer_config, on_policy)
    target = load_some(config, processes.device, config.whole_target, config.tp_plan)
    cache = FeatureCache(config.data.cache) if config.data.cache else None
    samples = cache.samples if cache is not None and not config.data.path else load_samples(config.data, target)
    if not config.whole_target:
        target.sizes = cache.sizes() if cache is not None else {}
    learnt, heldout = hold_out(samples[: config.data.limit], config.data.heldout)
    drafter = build_drafter(config.drafter, target, learnt, trainer_config.seed)
    as_saved(drafter, target)  # refuses a drafter that could not be exported after its training
    if cache is not None:
        cache.check(target, drafter.taps, drafter.vocab, samples)
    objective = instantiate(config.objective, "objective")
    if (deepest := drafter.deepest(objective.steps)) < objective.steps:
        raise ValueError(
            f"objective.steps is {objective.steps}, but this drafter drafts {deepest} tokens only: give "
            f"objective={family_of(drafter).objective}, or objective.steps={deepest}"
        )
    how = trainer_config.batch_tokens, trainer_config.seed, config.data.pack
    data = Batches(learnt, *how, objective.lookahead)
    ahead = max(objective.lookahead, trainer_config.decode_steps)  # the chain of the expected tau reads on too
    trainer_config = trainer_config.over(len(data.epoch(0)) / processes.world)
    learns = target, drafter, objective, data, Batches(heldout, *how, ahead) if heldout else None
    settings = cast(dict, OmegaConf.to_container(config, resolve=True))
    more = processes, on_policy, online_features if cache is None else cache.features, data_signature(learnt)
    return Trainer(*learns, trainer_config, Path(config.out), settings, *more)


def rehearse(trainer: Trainer, drafter: str, objective: str, decodes: bool) -> None:
    """Try the user's own code before a run begins, which it leaves unchanged: a mistake is then found before its hours.

    That is a loss with gradients, saving, loading, and, if the target's layers are loaded (`decodes`), decoding a few
    tokens. drafter, objective: their names in the settings. Raises ValueError if the code fails, or if what it makes
    cannot be trained, saved or loaded.
    """
    mine = [name for name in (drafter, objective) if own.is_own(name) or "." not in name]
    if not mine or trainer.processes.world > 1:  # a backward pass of one process would wait for the others
        return
    with own.blamed(" and ".join(mine), "a first training step"):
        batch = trainer.data.collate(trainer.data.epoch(0)[0][:1])
        loss, metrics = trainer._loss(batch)
        loss.backward()
        Sums().add(batch.loss_mask, loss, metrics)
        moved = any(p.grad is not None for p in trainer.parameters.values())
        for parameter in trainer.parameters.values():
            parameter.grad = None
        if not moved:
            raise ValueError("the loss depends on no parameter")
    if drafter not in mine:
        return
    with tempfile.TemporaryDirectory() as folder, own.blamed(drafter, "saving and loading it"):
        save_drafter(trainer.drafter, Path(folder) / "draft", trainer.target)
        loaded = load_drafter(Path(folder) / "draft", trainer.target)
        there = loaded.state_dict()
        for name, value in trainer.drafter.state_dict().items():
            if name not in there or not torch.equal(there[name].float(), value.to(trainer.target.dtype).float()):
                raise ValueError(f"{name} has another value after loading: only parameters are saved, so make it one")
    if decodes:
        with own.blamed(drafter, "decoding with it"):
            steps = loaded.deepest(3)
            for tree in (Chain(steps),) if loaded.chains_only else (Chain(steps), DynamicTree(2, steps)):
                Engine(trainer.target, loaded, tree).generate([[1, 2, 3], [2, 1]], max_new_tokens=6)


def warn_of_epochs(trainer: Trainer) -> None:
    """Say it if a run is to see its conversations more often than anybody lets them be seen."""
    a_step = trainer.config.accumulate * trainer.processes.world
    epochs = trainer.config.length * a_step / len(trainer.data.epoch(0))
    if epochs > MANY:
        print(
            f"warning: {trainer.config.length} steps are {epochs:.0f} passes over {len(trainer.data.samples)} "
            "conversations, which will be learnt by heart: let the target answer more prompts, or set trainer.epochs"
        )


def warn_of_prompts(trainer: Trainer) -> None:
    """Say it if `trainer.prompts` asks for tau and there is nothing to decode."""
    if trainer.config.prompts is not None and trainer.decoding is None:
        print(
            "warning: tau will not be measured, as data.heldout leaves no prompt that the training data lack: give "
            "trainer.prompts=FILE, a file of other prompts"
        )


def warn_of_servers(drafter, target: LanguageModel) -> None:
    """Say on one line which servers could not load what is about to be trained, and what would change that."""
    if reasons := without_a_form(drafter, target):
        said = "; ".join(f"{SERVERS[server]} could not load this drafter: {why}" for server, why in reasons.items())
        print(f"warning: {said}")


def run(config: DictConfig) -> None:
    """A run that a signal stops is saved, and ends the process with 128 + its number, as shells have it."""
    trainer = run_through(config)
    if trainer.owed and trainer.main:
        sys.exit(trainer.signals.code)


def run_through(config: DictConfig) -> Trainer:
    """Check the settings, and train to the end or to a signal."""
    all_settings(config)  # reports mistakes before the target is loaded
    out = Path(config.out)
    with no_empty_folder(config.out):
        # With `auto` a run is resumed where it has a checkpoint, and else begun.
        resume = bool(checkpoints(out)) if config.resume == "auto" else bool(config.resume)
        check_folder(out, resume)
        if resume and config.data.day is None:
            config.data.day = begun_on(out / "config.yaml")
        different = check_same_run(config, out) if resume else []
        processes = join_processes(config.device, config.tp_plan)
        if config.tp_plan is not None:
            ranks.silence()
        if different and processes.main:
            print(f"note: {'; '.join(different)}", file=sys.stderr)
        with only_writer(out, inside=True) if processes.main else nullcontext():
            return train(config, out, processes, resume)


def draft_of(trainer: Trainer) -> str:
    """The name of a finished run's drafter for `--draft`, with the user's own code, if it needs any."""
    draft = str(trainer.out / "draft")
    recipe: Mapping[str, Any] = trainer.drafter.recipe or {}
    if family_of(trainer.drafter) is not FAMILY or not own.is_own(recipe.get("_target_")):
        return draft
    return f"{own.as_passed(recipe['_target_'])}:{draft}"


def what_next(config: DictConfig, trainer: Trainer) -> str:
    """The command that shows the trained drafter: a target that is not whole decodes in a server only."""
    draft = draft_of(trainer)
    if not config.whole_target:
        if "vllm" in without_a_form(trainer.published, trainer.target):
            return shlex.join(["checkpoint", "inspect", draft])
        target = str(config.target.path or DEMO_TARGET)
        return shlex.join(["checkpoint", "export", draft, "FOLDER", "--for", "vllm", "--target", target])
    whose = ["--target", config.target.path] if config.target.path else []
    return shlex.join(["generate", *whose, "--draft", draft, "--prompts", "FILE", "--limit", "20", "--compare"])


def train(config: DictConfig, out: Path, processes: Processes, resume: bool) -> Trainer:
    """Assemble the run, and train to its end. The caller has locked `out`."""
    trainer = assemble(config, processes)
    rehearse(trainer, config.drafter._target_, config.objective._target_, config.whole_target)
    if resume:
        trainer.resume()
    if processes.main:
        record(config, out, resume)
        samples, parameters = trainer.data.samples, sum(p.numel() for p in trainer.drafter.parameters())
        taps = trainer.drafter.taps
        print(
            f"{len(samples)} conversations, {sum(len(s.ids) for s in samples)} tokens an epoch; drafter of "
            f"{parameters} parameters, reading hidden state{'' if len(taps) == 1 else 's'} "
            f"{', '.join(map(str, taps)) or 'none'} of 0 (the embedding) to {trainer.target.config.layers}"
        )
        warn_of_epochs(trainer)
        warn_of_prompts(trainer)
        warn_of_servers(trainer.published, trainer.target)
    metrics = trainer.train()
    if processes.main:
        if not trainer.owed:
            print(f"try it: specdec {what_next(config, trainer)}")
        report = {"step": trainer.step} | metrics
        print(json.dumps(report | {"draft": draft_of(trainer), "seconds": round(trainer.seconds, 1)}))
    return trainer
