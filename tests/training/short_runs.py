"""Short runs in one process, which are interrupted and go on, and what their steps keep."""

import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from test_trainer import samples

from specdec.drafters.formats import load_drafter
from specdec.engine.engine import Engine
from specdec.training.data import Batches
from specdec.training.loop.checkpoint import checkpoints
from specdec.training.loop.trainer import Trainer, TrainerConfig
from specdec.trees import Chain


def short_run(out: Path, target, drafter, objective, pack: int | None) -> Trainer:
    """Six steps, with a checkpoint behind three."""
    out.mkdir(exist_ok=True)
    config = {"steps": 6, "save_every": 3, "log_every": 1, "eval_batches": 1, "warmup": 0, "batch_tokens": 40}
    batches, heldout = Batches(samples(), 40, 0, pack), Batches(samples(4), 40, 0, pack)
    return Trainer(target, drafter, objective, batches, heldout, TrainerConfig(**config), out)


@mock.patch("specdec.training.loop.trainer.draw_curves", new=mock.Mock())  # it takes longer than the runs
def check_resumed(begin: Callable[[Path], Trainer], folder: Path) -> tuple[Trainer, dict]:
    """A run that goes on behind its third step ends as the uninterrupted one, which is returned with its report.

    What comes out is loaded again, to the last bit, and decodes the target's text."""
    whole = begin(folder / "whole")
    before = [p.detach().clone() for p in whole.parameters.values()]
    report = whole.train()
    assert not any(torch.equal(x, y) for x, y in zip(before, whole.parameters.values(), strict=True) if x.ndim == 2)
    shutil.copytree(folder / "whole", folder / "cut")
    checkpoints(folder / "cut")[-1].unlink()
    resumed = begin(folder / "cut")
    resumed.resume()
    assert resumed.step == 3
    assert resumed.train()["heldout_losses"] == report["heldout_losses"]
    assert all(torch.equal(p, resumed.parameters[name]) for name, p in whole.parameters.items())
    assert len(report["accuracy"]) == whole.drafter.block
    drafter = load_drafter(folder / "whole" / "draft", whole.target)
    assert (drafter.block, drafter.taps, drafter.switches) == (
        whole.drafter.block, whole.drafter.taps, whole.drafter.switches,
    )  # fmt: skip
    for name, p in drafter.named_parameters():
        assert torch.equal(p, whole.parameters[name]), name
    prompts = [[3, 5, 7], [1, 2]]
    plain = Engine(whole.target).generate(prompts, max_new_tokens=12)
    drafted = Engine(whole.target, drafter, Chain(drafter.block)).generate(prompts, max_new_tokens=12)
    assert [row.tokens for row in drafted.rows] == [row.tokens for row in plain.rows]
    return whole, report


def kept_bytes(drafter, objective, shape: tuple[int, int]) -> int:
    """Bytes that a forward of a batch [B,T] of a tiny target keeps for the backward, what heads read included."""
    kept = {}
    own = {t.untyped_storage().data_ptr() for t in (*drafter.parameters(), *drafter.buffers())}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        feats = torch.zeros(*shape, len(drafter.taps) * 32)
        (readout,) = objective.readouts(drafter, feats, torch.zeros(shape, dtype=torch.int64))
    real = sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in own)
    return real + readout.untyped_storage().nbytes()
