"""The defaults of a run: the recipe, its length, its held-out data, and its summary."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from short_runs import CONVERSATIONS, composed_alone

from specdec.acceptance import read_acceptance
from specdec.drafters.eagle3 import choose_taps
from specdec.drafters.formats import load_drafter
from specdec.engine.traces import RowTrace, tau
from specdec.model.loader import load_target
from specdec.training import train
from specdec.training.data import Batches, Sample, hold_out
from specdec.training.loop.evaluate import beginnings, measured_tau
from specdec.training.loop.log import read_log
from specdec.training.loop.parallel import Processes
from specdec.training.loop.settings import TrainerConfig


def test_a_run_without_choices(where, target_path, tmp_path, capsys):
    """Muon, a norm for each tap, the last hidden state, two parts; at its end tau, its interval and acceptance.json."""
    out, target = tmp_path / "run", load_target(target_path)
    train.run(composed_alone("train", *where, f"out={out}"))
    result = json.loads(capsys.readouterr().out.strip().split("\n")[-1])
    samples = [c for c in CONVERSATIONS if c not in CONVERSATIONS[-3:]]  # 0.05 of 60 are held out
    rows = {row["split"]: row for row in read_log(out / "log.jsonl")}
    assert rows["train"]["learnt"] <= 2 * sum(len(c[1]["content"]) + 1 for c in samples), "more than two epochs"
    assert result["tau_low"] <= result["tau"] <= result["tau_high"]
    assert rows["decode"]["tau_high"] == result["tau_high"]
    drafter = load_drafter(out / "draft", target)
    assert drafter.taps[-1] == target.config.layers
    assert drafter.switches.tap_norms
    assert drafter.switches.feedback == "post"
    assert len(read_acceptance(out / "draft").measured[0].texts) == 3
    assert not (out / "best").exists()


def test_the_default_is_muon_and_two_parts():
    config = composed_alone("train", "out=x")
    assert config.trainer.muon_lr
    assert (config.objective.terms, config.objective.then) == (None, {"tokens": 1.0}), "null is cross-entropy"
    assert config.drafter.init == "target"
    assert choose_taps(32, config.drafter.taps) == (2, 16, 32)
    assert choose_taps(3, config.drafter.taps) == (1, 2, 3)
    assert config.data.heldout < 1


@pytest.mark.parametrize(
    ("settings", "steps"), [({}, 20), ({"epochs": 0.5}, 5), ({"epochs": 3, "accumulate": 4}, 8), ({"steps": 7}, 7)]
)
def test_how_long_a_run_is(settings, steps):
    assert TrainerConfig(**settings).over(batches=10).steps == steps


def test_steps_and_epochs_exclude_each_other():
    with pytest.raises(ValueError, match=r"trainer\.steps and trainer\.epochs both say"):
        TrainerConfig(steps=3, epochs=1)
    with pytest.raises(ValueError, match=r"trainer\.epochs must be positive"):
        TrainerConfig(epochs=0)


@pytest.mark.parametrize(
    ("count", "heldout", "expected"), [(100, 0.05, 5), (3, 0.05, 1), (20_000, 0.05, 256), (10, 4, 4), (10, 0, 0)]
)
def test_how_much_is_held_out(count, heldout, expected):
    rest, held = hold_out(list(range(count)), heldout)
    assert len(held) == expected
    assert rest + held == list(range(count))


@pytest.mark.parametrize(("count", "heldout"), [(1, 0.5), (5, 5), (5, -1)])
def test_what_cannot_be_held_out(count, heldout):
    with pytest.raises(ValueError, match=r"data\.heldout"):
        hold_out(list(range(count)), heldout)


def sample(ids: list[int], prompt: int) -> Sample:
    return Sample(np.array(ids, dtype=np.int32), np.arange(len(ids)) >= prompt)


def test_prompts_of_what_is_held_out():
    """Each once, no training prompt, none too long, and no plain text."""
    held = [sample([1, 2, 9], 2), sample([1, 2, 8], 2), sample([3, 4, 7], 2), sample([5, 6], 0), sample([1] * 9, 8)]
    assert beginnings(held, [sample([3, 4, 5], 2)], longest=5) == [[1, 2]]


def test_the_interval_of_tau_is_that_of_drawn_prompts():
    rng = np.random.default_rng(1)
    traces = [RowTrace(emitted=rng.integers(1, 5, 20).tolist()) for _ in range(40)]
    found = measured_tau(traces)
    assert found["tau_low"] < found["tau"] == tau(traces) < found["tau_high"]
    # For rows of equal length tau is the mean of the rows' own.
    own = np.array([tau([trace]) for trace in traces])
    half = 1.96 * own.std() / len(own) ** 0.5
    assert found["tau_high"] - found["tau_low"] == pytest.approx(2 * half, rel=0.15)
    assert set(measured_tau([traces[0]] * 5).values()) == {tau(traces[:1])}
    assert measured_tau(traces[:1]) == {"tau": tau(traces[:1])}


@pytest.mark.parametrize(("steps", "said"), [(45, True), (40, False)])
def test_too_many_epochs_are_warned_of(steps, said, capsys):
    data = Batches([sample([1, 2, 3], 1)] * 4, batch_tokens=12, seed=0)
    assert len(data.epoch(0)) == 1
    run = SimpleNamespace(config=TrainerConfig(steps=steps), processes=Processes(), data=data)
    train.warn_of_epochs(run)
    warning = "warning: 45 steps are 45 passes over 4 conversations, which will be learnt by heart"
    assert (warning in capsys.readouterr().out) == said
