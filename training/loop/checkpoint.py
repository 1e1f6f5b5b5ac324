"""Checkpoints of a run: `checkpoints/step-00000200.pt`, each written atomically, of which the last few stay.

A checkpoint is a zip with a checksum for every tensor. One that was cut off or altered is recognised by these, and the
one before it is used. A run continues from a state by `restore`.
"""

import pickle
import re
import sys
import zipfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from specdec.cli.files import output_folder, write_whole
from specdec.contracts import Drafter
from specdec.training.loop.weights import full, sharded_as

if TYPE_CHECKING:
    from specdec.training.loop.trainer import Trainer

FOLDER = "checkpoints"
NAME = re.compile(r"step-(\d{8,})\.pt")
FUSION = ", fusion='shared'"  # in descriptions of version 0.1 for block drafters: a removed setting, at its default


def checkpoints(out: Path) -> list[Path]:
    """The checkpoints of the run in `out`, oldest first."""
    steps = {p: int(match[1]) for p in (out / FOLDER).glob("step-*.pt") if (match := NAME.fullmatch(p.name))}
    return sorted(steps, key=steps.__getitem__)


def write_checkpoint(out: Path, step: int, state: dict, keep: int) -> Path:
    """Write the state after `step`, then delete all checkpoints but the last `keep`. state: tensors and plain values.

    Raises ValueError if the disk does not take it. What was there before stays.
    """
    path = out / FOLDER / f"step-{step:08d}.pt"
    try:
        write_whole(output_folder(path.parent) / path.name, partial(save_state, state))
    except ValueError as error:
        last = next(reversed(checkpoints(out)), None)
        rest = f"{last} is the last good one, and resume=true goes on from it" if last else "there is none before it"
        raise ValueError(f"{error}; {rest}") from None
    for old in checkpoints(out)[:-keep]:
        old.unlink()
    return path


def save_state(state: object, path: Path) -> None:
    """`torch.save` through a file of ours: through a file of its own it hides why the system refuses to write."""
    with path.open("wb") as file:
        torch.save(state, file)


def read_newest(out: Path, warn: bool = True) -> tuple[Path, dict]:
    """Path and state, on the CPU, of the newest checkpoint that is sound.

    A sentence on standard error names each newer one that is damaged. Raises ValueError if none is whole.
    """
    paths = checkpoints(out)
    if not paths:
        raise ValueError(f"nothing to resume: {out / FOLDER} holds no checkpoint")
    for path in reversed(paths):
        try:
            return path, read_checkpoint(path)
        except ValueError as error:
            if warn:
                print(f"warning: {error}; the one before it is used", file=sys.stderr)
    raise ValueError(f"nothing to resume: every checkpoint in {out / FOLDER} is damaged or not ours")


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
        "step": run.step,
        "batches": run.batches,
        "tokens": run.tokens,
        "learnt": run.learnt,
        "seconds": run.seconds,
        "rollout_seconds": run.rollout_seconds,
        "best": run.best,
        "owed": run.owed,
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
    _check_same_run(run, state, path)
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
    run.step, run.batches, run.tokens = state["step"], state["batches"], state["tokens"]
    run.seconds, run.best = state["seconds"], state["best"]
    run.owed = state.get("owed", False)  # older checkpoints lack these three
    run.learnt = state.get("learnt", 0)
    run.rollout_seconds = state.get("rollout_seconds", 0.0)
    if run.rollouts is not None and state.get("rollouts"):
        run.rollouts.load_state_dict(state["rollouts"])


def _check_same_run(run: "Trainer", state: dict, path: Path) -> None:
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
