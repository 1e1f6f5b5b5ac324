"""Checkpoints of a run: `checkpoints/step-00000200.pt`, each written atomically, of which the last few stay.

A checkpoint is a zip with a checksum for every tensor. One that was cut off or altered is recognised by these, and the
one before it is used. A run continues from a state by `restore`, with the settings that it began with: changes of its
result are refused, others are reported.
"""

import pickle
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from omegaconf import DictConfig, OmegaConf

from specdec import own
from specdec.cli.files import output_folder, write_whole
from specdec.contracts import Drafter
from specdec.registry import read_yaml
from specdec.schema import shown
from specdec.training.loop.parallel import full, sharded_as

if TYPE_CHECKING:
    from specdec.training.loop.trainer import Trainer

FOLDER = "checkpoints"
NAME = re.compile(r"step-(\d{8,})\.pt")
FUSION = ", fusion='shared'"  # in descriptions of version 0.1 for block drafters: a removed setting, at its default
REMOVED = {"drafter.fusion": "shared"}  # settings of version 0.1, at the value that is built in now
# What the weights do not depend on. Checkpoints say themselves whether the data, and the batches of a step over all
# processes, are the same: a file may move, and more processes may accumulate less.
FREE = {
    "out", "resume", "logger", "device", "tp_plan", "whole_target", "target.device_map",
    "data.path", "data.cache", "data.streaming",
} | {
    f"trainer.{name}"
    for name in (
        "accumulate", "fsdp", "recompute", "log_every", "save_every", "keep", "eval_batches", "prompts", "decode_every",
        "decode_prompts", "decode_tokens", "decode_steps", "logger", "wandb",
    )
}  # fmt: skip
SILENT = {"out", "resume"}
COUNTERS = ("step", "batches", "tokens", "learnt", "seconds", "rollout_seconds", "best", "owed")  # of a `Trainer`


def checkpoints(out: Path) -> list[Path]:
    """The checkpoints of the run in `out`, oldest first."""
    steps = {p: int(match[1]) for p in (out / FOLDER).glob("step-*.pt") if (match := NAME.fullmatch(p.name))}
    return sorted(steps, key=steps.__getitem__)


def write_checkpoint(out: Path, step: int, state: dict, keep: int) -> Path:
    """Write the state after `step`, then delete all but `keep` of those up to it: later ones were damaged at resume.

    A full disk leaves what was there before.
    """
    path = out / FOLDER / f"step-{step:08d}.pt"
    try:
        write_whole(output_folder(path.parent) / path.name, partial(save_state, state))
    except ValueError as error:
        last = next(reversed(checkpoints(out)), None)
        rest = f"{last} is the last good one, and resume=true goes on from it" if last else "no earlier one exists"
        raise ValueError(f"{error}; {rest}") from None
    there = checkpoints(out)
    for old in there[: there.index(path) + 1][:-keep]:
        old.unlink()
    return path


def save_state(state: object, path: Path) -> None:
    """`torch.save` through a file of ours: through a file of its own it hides why the system refuses to write."""
    with path.open("wb") as file:
        torch.save(state, file)


def read_newest(out: Path, warn: bool = True) -> tuple[Path, dict]:
    """Path and state, on the CPU, of the newest sound checkpoint. A warning names each newer one that is damaged."""
    paths = checkpoints(out)
    if not paths:
        raise ValueError(f"nothing to resume: {out / FOLDER} holds no checkpoint: leave out resume=true to begin")
    for path in reversed(paths):
        try:
            return path, read_checkpoint(path)
        except ValueError as error:
            if warn:
                print(f"warning: {error}; the one before it is used", file=sys.stderr)
    raise ValueError(f"nothing to resume: every checkpoint in {out / FOLDER} is damaged or not ours: give another out=")


def read_checkpoint(path: Path) -> dict:
    """A checkpoint's state on the CPU. Raises ValueError if any byte of it is not what was written."""
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
        if broken is not None:
            raise ValueError(f"the checksum of {broken} is wrong")
        return torch.load(path, map_location="cpu", weights_only=True)
    except (zipfile.BadZipFile, pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged or not ours: {str(error).splitlines()[0]}") from None


def meaning(drafter: Drafter) -> str:
    """What a drafter's weights mean beyond their shapes: taps, rope, and so on."""
    return f"{type(drafter).__name__} taps {list(drafter.taps)} {drafter.shape} {drafter.switches}".strip()


def state_of(run: "Trainer") -> dict:
    """Tensors and plain values, all of them full and none of them shards; every process must call it."""
    return {
        **{name: getattr(run, name) for name in COUNTERS},
        "meaning": run.meaning,
        "data": run.data_signature,
        "together": run.together,
        "vocab": run.drafter.vocab.ids,
        "drafter": full({name: p.detach() for name, p in run.parameters.items()}),
        "averages": full(run.averages),
        "optimizers": run.optimizers.state_dict(),
        "rollouts": None if run.rollouts is None else run.rollouts.state_dict(),
    }


def restore(run: "Trainer", state: dict, path: Path) -> None:
    """Continue a run from the state in `path`. Raises ValueError if the state is of another run."""
    _check_state(run, state, path)
    weights = state["drafter"]
    with torch.no_grad():
        for name, parameter in run.parameters.items():
            parameter.copy_(sharded_as(weights[name], parameter))
            if run.averages is not None:
                run.averages[name].copy_(sharded_as(state["averages"][name], parameter))
    try:
        run.optimizers.load_state_dict(state["optimizers"])
    except ValueError as error:
        raise ValueError(f"{path} was saved with another trainer.muon_lr: {error}") from None
    older = {"owed": False, "learnt": 0, "rollout_seconds": 0.0}  # older checkpoints lack these three
    for name in COUNTERS:
        setattr(run, name, (older | state)[name])
    if run.rollouts is not None and state.get("rollouts"):
        run.rollouts.load_state_dict(state["rollouts"])


def _check_state(run: "Trainer", state: dict, path: Path) -> None:
    weights, vocab, ids = state.get("drafter", {}), state.get("vocab"), run.drafter.vocab.ids
    same_shapes = {k: v.shape for k, v in run.parameters.items()} == {k: v.shape for k, v in weights.items()}
    same_vocab = vocab is None if ids is None else vocab is not None and torch.equal(ids.cpu(), vocab)
    if not same_shapes or not same_vocab or state["meaning"].replace(FUSION, "") != run.meaning:
        raise ValueError(
            f"{path} belongs to another drafter: give the same drafter and data settings, or another `out`"
        )
    signatures = state.get("data"), run.data_signature
    if None not in signatures and signatures[0] != signatures[1]:  # older checkpoints lack it, and the next
        raise ValueError(
            f"{path} has learnt other conversations than data.path gives now: give the same, or another `out`"
        )
    if state.get("together", run.together) != run.together:
        raise ValueError(
            f"{path} took {state['together']} batches a step, and this run takes {run.together}, over all processes: "
            "set trainer.accumulate accordingly"
        )
    if (state["averages"] is None) != (run.averages is None):
        raise ValueError(f"{path} was saved {'with' if state['averages'] else 'without'} trainer.ema: set it so")


def check_same_run(config: DictConfig, out: Path) -> list[str]:
    """Compare settings with those of the run in `out`; a run without config.yaml is not looked at.

    Returns the differing settings, without changing the run, as 'NAME was A and is B'. Raises ValueError, which names
    them, if one changes the run.
    """
    if not (out / "config.yaml").is_file():
        return []
    before = dict(_flat(read_yaml(out / "config.yaml", "settings")))
    now = dict(_flat(cast(dict, OmegaConf.to_container(config, resolve=True))))
    # Settings of another version that were off, or had the value that is built in now
    gone = {name for name, value in before.items() if name not in now and (not value or REMOVED.get(name) == value)}
    names = [name for name in (*before, *(now.keys() - before.keys())) if before.get(name) != now.get(name)]
    names = [name for name in names if name not in gone]
    said = {name: f"{name} was {shown(before.get(name))} and is {shown(now.get(name))}" for name in names}
    if changing := [said[name] for name in names if name not in FREE]:
        raise ValueError(
            f"{out} holds a run of other settings: {'; '.join(changing)}: give them as they were, or another out="
        )
    return [said[name] for name in names if name not in SILENT]


def _flat(settings: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{path}{name}.")
        elif name == "_target_":  # version 0.1 wrote it without the package's name
            yield f"{path}{name}", own.short(str(value)).removeprefix("specdec.")
        else:
            yield f"{path}{name}", value
