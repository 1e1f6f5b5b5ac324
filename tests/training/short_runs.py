"""Short runs in this process: their settings, their logs, and runs that are interrupted and continue."""

import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import tiny_drafter, tiny_target
from hydra import compose, initialize_config_dir

from specdec.cli.errors import one_sentence_errors
from specdec.training.data import Batches, Sample
from specdec.training.loop.log import read_log
from specdec.training.loop.settings import OnPolicy
from specdec.training.loop.trainer import Trainer, TrainerConfig
from specdec.training.objectives.eagle3 import Eagle3Objective

CONF = Path(__file__).parents[2] / "conf"
CONVERSATIONS = [
    [{"role": "user", "content": f"What is {a} + {b}?"}, {"role": "assistant", "content": f"It is {a + b}."}]
    for a in range(10)
    for b in range(6)
]
# Of a run of the command over CONVERSATIONS that takes a second
SMALL = (
    "drafter.draft_vocab_size=200", "data.heldout=8", "trainer.batch_tokens=256", "trainer.steps=4",
    "trainer.log_every=1", "trainer.save_every=2", "trainer.eval_batches=2", "objective.steps=3",
    "trainer=small", "objective=eagle3", "drafter=eagle3",
)  # fmt: skip


@contextmanager
def small_files(room: int) -> Iterator[None]:
    """No file can grow beyond `room` bytes, as on a disk that is full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def write_rows(path: Path, *rows: dict | list | bytes) -> Path:
    lines = (row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows)
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def composed(command: str, *overrides: object):
    """The settings of a command, small where `overrides` are silent."""
    return composed_alone(command, *SMALL, *overrides)


def composed_alone(command: str, *overrides: object):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(command, [str(word) for word in overrides])


def refused(capsys, command, *words: object) -> str:
    """What the command of a module says about small settings, which is one sentence, and ends with 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        one_sentence_errors(command.run)(composed(command.__name__.rpartition(".")[2], *words))
    assert stopped.value.code == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("error: ")
    assert "\n" not in said
    return said


def logged(out: Path) -> list[dict]:
    """The rows of a run's log without their times."""
    times = ("seconds", "rollout_seconds", "tokens_per_second")
    return [{k: v for k, v in row.items() if k not in times} for row in read_log(out / "log.jsonl")]


def assert_same_weights(one: Trainer, other: Trainer) -> None:
    for name, parameter in one.parameters.items():
        assert torch.equal(parameter, other.parameters[name]), name


def assert_goes_on(begin: Callable[[Path], Trainer], cut: Path, step: int) -> None:
    """A run that was cut continues after `step` and ends as the uninterrupted one, with the same log."""
    whole, resumed = begin(cut.parent / "whole"), begin(cut)
    whole.train()
    resumed.resume()
    assert resumed.step == step
    resumed.train()
    assert_same_weights(whole, resumed)
    assert logged(cut) == logged(cut.parent / "whole")


def samples(count: int = 24, vocab: int = 17) -> list[Sample]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(6, 14, count)
    return [Sample(rng.integers(vocab, size=n, dtype=np.int32), np.arange(n) >= 2) for n in lengths]


def trainer(
    out: Path, kind="eagle3", objective=None, data=None, pack=None, drafter=None, on_policy: dict | None = None, **how
) -> Trainer:
    """A run over random text that takes part of a second."""
    out.mkdir(exist_ok=True)
    target = tiny_target()
    how = {"steps": 6, "save_every": 2, "log_every": 1, "eval_batches": 1, "warmup": 0, "batch_tokens": 40} | how
    drafter = drafter(target) if drafter else tiny_drafter(target, draft_vocab=8, kind=kind)
    data = data or Batches(samples(), how["batch_tokens"], 0, pack, lookahead=3)
    heldout = Batches(samples(4), 40, 0, pack, lookahead=2)
    policy = None if on_policy is None else OnPolicy(**on_policy)
    objective = objective or Eagle3Objective(steps=2)
    return Trainer(target, drafter, objective, data, heldout, TrainerConfig(**how), out, on_policy=policy)


# Rows of 12 tokens: which are training tokens, and of which text they are
LEARNT = [[0, 1, 1, 1, 0, 1, 1, 0, 0, 1, 1, 1], [1] * 12]
TEXTS = [[0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]]


def packed_batch(target, drafter) -> dict:
    data = batch(target, drafter, rows=2)
    drafter.documents, drafter.first_tokens = torch.tensor(TEXTS), data["tokens"][:, 0]
    return data | {"loss_mask": torch.tensor(LEARNT).float()}


def batch(target, drafter, rows: int = 4, length: int = 12) -> dict:
    """The target's outputs for random texts, whose first three tokens are no training tokens."""
    torch.manual_seed(3)
    tokens = torch.randint(target.config.vocab, (rows, length))
    with torch.no_grad():
        logits, feats = target(tokens, None, taps=drafter.taps)
    feats = torch.zeros(rows, length, 0) if feats is None else feats
    mask = (torch.arange(length) >= 3).float().expand(rows, length)
    return {"feats": feats, "tokens": tokens, "teacher_logits": logits, "loss_mask": mask}


def gradient(rows: torch.Tensor) -> torch.Tensor:
    """Of a parameter, or of a view of its rows."""
    parameter = rows if rows._base is None else rows._base
    return parameter.grad.as_strided(rows.shape, rows.stride(), rows.storage_offset())


def compare_gradients(places: dict, loss, wanted: dict) -> None:
    """Every gradient to 1e-4 of its largest entry; of matrices their products with four vectors of cosines. places: of
    each name the parameter, or rows of it."""
    loss.backward()
    for key, expected in wanted.items():
        got = gradient(places[key])
        if got.ndim == 2:
            angles = torch.arange(1, got.shape[1] + 1)[:, None] * torch.arange(1, 5)
            got = got @ angles.float().cos()
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-4 * expected.abs().max().item())
    assert len(wanted) > 2
