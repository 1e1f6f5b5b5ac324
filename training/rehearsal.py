"""A run of the user's own code in small, before a training run begins: a mistake is then found before its hours."""

import tempfile
from pathlib import Path

import torch

from specdec import own
from specdec.contracts import Drafter
from specdec.drafters.formats import load_drafter, save_drafter
from specdec.engine.engine import Engine
from specdec.model.language_model import LanguageModel
from specdec.training.loop.trainer import Trainer
from specdec.trees import Chain, DynamicTree

TOKENS = 6  # of the rehearsed decoding


def rehearse(trainer: Trainer, drafter: str, objective: str, decodes: bool) -> None:
    """Try the operations of a run before its first step, which leaves the run unchanged, if it has the user's own code.

    These are a loss with gradients, saving, loading, and, if the target's layers are loaded (`decodes`), decoding a few
    tokens. drafter, objective: their names in the settings. Runs of several processes are not rehearsed. Raises
    ValueError if the user's code fails, or makes something that cannot be trained, saved or loaded.
    """
    mine = [name for name in (drafter, objective) if own.is_own(name) or "." not in name]
    if not mine or trainer.processes.world > 1:  # a backward pass of one process would wait for the others
        return
    with own.blamed(mine[0], "a first training step"):
        _learn(trainer)
    if drafter in mine:
        with tempfile.TemporaryDirectory() as folder, own.blamed(drafter, "saving and loading it"):
            loaded = _save(trainer.drafter, trainer.target, Path(folder))
        if decodes:
            with own.blamed(drafter, "decoding with it"):
                _decode(loaded, trainer.target)


def _learn(trainer: Trainer) -> None:
    first = trainer.data.epoch(0)[0][:1]
    loss, _ = trainer._loss(trainer.data.collate(first))
    loss.backward()
    moved = [name for name, p in trainer.parameters.items() if p.grad is not None]
    for parameter in trainer.parameters.values():
        parameter.grad = None
    if not moved:
        raise ValueError("the loss depends on no parameter")


def _save(drafter: Drafter, target: LanguageModel, folder: Path) -> Drafter:
    save_drafter(drafter, folder / "draft", target)
    loaded = load_drafter(folder / "draft", target)
    there = loaded.state_dict()
    for name, value in drafter.state_dict().items():
        if name not in there or not torch.equal(there[name].float(), value.to(target.dtype).float()):
            raise ValueError(f"{name} has another value after loading: only parameters are saved, so make it one")
    return loaded


def _decode(drafter: Drafter, target: LanguageModel) -> None:
    prompts = [[1, 2, 3], [2, 1]]
    steps = drafter.deepest(3)
    for tree in (Chain(steps),) if drafter.chains_only else (Chain(steps), DynamicTree(2, steps)):
        Engine(target, drafter, tree).generate(prompts, max_new_tokens=TOKENS)
