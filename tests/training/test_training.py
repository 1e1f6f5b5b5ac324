"""The command that trains: a run that learns, mistakes, a run that continues, and what is set where nothing is."""

import json
import os
import re
import shutil
import signal
from types import SimpleNamespace

import helpers
import numpy as np
import pytest
import torch
from helpers import main_of, run_here
from short_runs import CONVERSATIONS, SMALL, composed_alone, write_rows

from specdec.acceptance import read_acceptance
from specdec.drafters.eagle3 import choose_taps
from specdec.drafters.formats import load_drafter
from specdec.drafters.vocab import DraftVocab, most_frequent
from specdec.engine.traces import RowTrace, tau
from specdec.model.loader import load_target
from specdec.training.data import Batches, Record, Sample, Tally, count_tokens, hold_out, read_samples
from specdec.training.loop.checkpoint import checkpoints
from specdec.training.loop.evaluate import beginnings, measured_tau
from specdec.training.loop.log import read_log
from specdec.training.loop.parallel import Processes
from specdec.training.loop.trainer import Trainer, TrainerConfig
from specdec.training.train import run as run_command
from specdec.training.train import warn_of_epochs, warn_of_prompts

train_main = main_of("train")


def train(where, out, *overrides: str) -> dict:
    """The command in this process: its last line, parsed."""
    done = run_here(train_main, *SMALL, *where, f"out={out}", *overrides)
    return json.loads(done.stdout.strip().split("\n")[-1])


def refused(where, out, *overrides: str) -> str:
    return helpers.refused(train_main, *SMALL, *where, f"out={out}", *overrides)


@pytest.fixture(scope="module")
def short_run(where, tmp_path_factory):
    """The folder of a run of two steps, to be copied."""
    out = tmp_path_factory.mktemp("short") / "run"
    assert train(where, out, "trainer.steps=2")["step"] == 2
    return out


def test_draft_vocabulary_is_the_most_frequent_tokens(target_path):
    records = [Record("a test", {"messages": messages}) for messages in CONVERSATIONS]
    samples = [*read_samples(records, load_target(target_path), max_length=100, too_long="cut", tally=Tally())]
    counts = count_tokens(samples, 400)
    assert counts.sum() == sum(int(s.mask.sum()) for s in samples)
    vocab = most_frequent(counts, 5)
    assert counts[vocab.ids].min() >= counts.sort(descending=True).values[4]
    assert vocab.ids.tolist() == sorted(vocab.ids.tolist())
    for ids, message in (([0, 10], "from 0 to 9"), ([1, 1], "twice")):
        with pytest.raises(ValueError, match=message):
            DraftVocab(10, torch.tensor(ids))


def test_a_run_learns_and_leaves_a_drafter_that_loads(where, target_path, tmp_path):
    """In a folder in which another was refused before."""
    refused(where, tmp_path / "run", "drafter.taps=[1,2,9]")
    result = train(where, tmp_path / "run", "trainer.steps=60", "trainer.save_every=60")
    losses = [row["loss"] for row in read_log(tmp_path / "run" / "log.jsonl") if row["split"] == "train"]
    assert losses[-1] < 0.97 * losses[0]  # most of the loss is the random target's own entropy
    assert len(result["accuracy"]) == 3
    assert (tmp_path / "run" / "config.yaml").exists()
    assert load_drafter(tmp_path / "run" / "draft", load_target(target_path)).vocab.size == 200


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.path=null"], "no training data: give data.path=FILE"),
        (["target.path=/no/such"], "no such checkpoint folder"),
        (["out=/proc/nowhere"], "cannot write to /proc/nowhere"),
        (["out=5"], "out must be a text, got 5: give a folder that is named by a number as ./5"),
        (["target.path=[a]"], "target.path must be a text, got ['a']"),
        (["data.cache=5"], "data.cache must be a text, got 5"),
        (["resume=true"], "nothing to resume"),
        (["data.heldout=60"], "data.heldout=60 holds out 60, and none is left to train on: give more data"),
        (["drafter.num_attention_heads=5", "drafter.num_key_value_heads=2"], "5 attention heads cannot share 2"),
        (["drafter.taps=[1,2,9]"], "taps hidden state 9"),
        (["trainer.stepz=3"], "Could not override 'trainer.stepz'. There is trainer.steps"),
        (["trianer.steps=3"], "Could not override 'trianer.steps'. There is trainer.steps"),
        (
            ["drafter=ngram", "drafter.taps=[1]"],
            "Another choice of drafter has this setting, and the chosen one has not",
        ),
        (["qqq=3"], "Could not override 'qqq'. specdec train --help lists all"),
        (["objective=nothing"], "Could not find 'objective/nothing'. There is block, eagle, "),
        (["trainer.prompts=/no/such"], "no such prompt file"),
        (
            ["drafter=dspark", "drafter.layers=1", "drafter.taps=[3]", "drafter.block_size=2", "drafter.rank=8"],
            "objective.steps is 3, but this drafter drafts 2 tokens only: give objective=block, or objective.steps=2",
        ),
        (
            ["drafter=dspark", "drafter.layers=1", "drafter.taps=[3]", "+drafter.causal=true", "drafter.label=p+k"],
            "no layout can express this drafter: dflash: a Markov or confidence head has no name for slot k for token",
        ),
    ],
)
def test_mistakes_are_one_sentence_and_leave_no_empty_folder(where, tmp_path, overrides, message):
    assert message in refused(where, tmp_path / "runs" / "mine", *overrides)
    assert list(tmp_path.iterdir()) == []


def test_a_prompt_that_does_not_fit_is_refused_before_the_run(where, tmp_path):
    prompts = write_rows(tmp_path / "prompts.jsonl", {"prompt": "Hi"}, {"prompt": "word " * 5000})
    said = refused(where, tmp_path / "run", f"trainer.prompts={prompts}")
    assert f"trainer.prompts={prompts} has a prompt of 25002 tokens" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("change", ["drafter.taps=[0,1,3]", "drafter.rope_theta=500.0", "drafter.draft_vocab_size=100"])
def test_another_drafters_run_is_not_resumed(short_run, where, tmp_path, change):
    """Also without config.yaml, from the checkpoint itself."""
    shutil.copytree(short_run, tmp_path / "run")
    (tmp_path / "run" / "config.yaml").unlink()
    assert "belongs to another drafter" in refused(where, tmp_path / "run", "trainer.steps=4", "resume=true", change)
    assert not (tmp_path / "run" / "config.yaml").exists()


# A run that continues

SHORT = ("trainer.steps=3", "trainer.batch_tokens=100", "trainer.eval_batches=1", "objective.steps=2", "data.heldout=4")


@pytest.fixture
def begun(target_path, tmp_path, monkeypatch):
    """A function that runs with changes, and returns standard error where the exit code is right, in a folder in which
    a run was stopped by `number` after step `at`."""
    out = tmp_path / "run"
    data = write_rows(tmp_path / "data.jsonl", *({"messages": c} for c in CONVERSATIONS))

    def run(*changes, code=0):
        words = [*SMALL, f"target.path={target_path}", f"data.path={data}", f"out={out}", *SHORT, *changes]
        done = run_here(train_main, *words)
        assert done.returncode == code, done.stderr
        return done.stderr

    def begin(number, code, at=2):
        def step(self, group, original=Trainer._step):
            if self.step == at - 1:
                os.kill(os.getpid(), number)
            return original(self, group)

        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "_step", step)
            assert f"stopped after step {at}; resume=true goes on" in run(code=code)
        assert checkpoints(out)[-1].name == f"step-{at:08d}.pt"

    run.begin, run.data, run.out = begin, data, out
    return run


def test_a_signal_saves_and_other_settings_are_reported_or_refused(begun):
    begun.begin(signal.SIGINT, 130)
    err = begun("resume=true", "trainer.lr=0.5", "drafter.init=random", "trainer.log_every=2", code=2)
    changes = "drafter.init was 'target' and is 'random'; trainer.lr was 0.001 and is 0.5:"
    assert f"holds a run of other settings: {changes}" in err
    assert "log_every" not in err
    err = begun("resume=true", "trainer.accumulate=2", code=2)
    assert "took 1 batches a step, and this run takes 2" in err
    lines = begun.data.read_text().splitlines()
    begun.data.write_text("\n".join([*lines[1:], lines[0]]))
    assert "has learnt other conversations than data.path gives now" in begun("resume=true", code=2)
    begun.data.write_text("\n".join(lines))
    assert "note: trainer.log_every was 1 and is 3\n" in begun("resume=true", "trainer.log_every=3")


def test_a_signal_in_the_last_step_stops_the_run_before_its_evaluation(begun):
    begun.begin(signal.SIGTERM, 143, at=3)
    assert read_log(begun.out / "log.jsonl")[-1]["split"] == "train"
    begun("resume=true")
    assert read_log(begun.out / "log.jsonl")[-1]["split"] == "heldout"


def test_a_run_of_an_older_version_goes_on(begun):
    """Version 0.1 named classes without the package's name. Settings that are gone change nothing if they were off."""
    begun.begin(signal.SIGTERM, 143)
    file = begun.out / "config.yaml"
    old = re.sub(r"_target_: specdec\.", "_target_: ", file.read_text())
    assert "_target_: training.objectives" in old
    file.write_text(old + "gone:\n  and_on: 0.5\n")
    assert "gone.and_on was 0.5 and is null" in begun("resume=true", code=2)
    file.write_text(old + "gone:\n  and_off: 0.0\n")
    assert "note:" not in begun("resume=true")


# Defaults: the recipe, the length of a run, its held-out data, its summary


def test_a_run_without_choices(where, target_path, tmp_path, capsys):
    """Muon, a norm for each tap, the last hidden state, two parts; at its end tau, its interval and acceptance.json."""
    out, target = tmp_path / "run", load_target(target_path)
    run_command(composed_alone("train", *where, f"out={out}"))
    result = json.loads(capsys.readouterr().out.strip().split("\n")[-1])
    samples = CONVERSATIONS[:-3]  # 0.05 of 60 are held out
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


def test_how_long_a_run_is():
    for settings, steps in (
        ({}, 20), ({"epochs": 0.5}, 5), ({"epochs": 3, "accumulate": 4}, 8), ({"steps": 7}, 7),
    ):  # fmt: skip
        assert TrainerConfig(**settings).over(batches=10).steps == steps
    with pytest.raises(ValueError, match=r"trainer\.steps and trainer\.epochs both say"):
        TrainerConfig(steps=3, epochs=1)
    with pytest.raises(ValueError, match=r"trainer\.epochs must be above 0"):
        TrainerConfig(epochs=0)


def test_how_much_is_held_out():
    for count, heldout, expected in (
        (100, 0.05, 5), (3, 0.05, 1), (20_000, 0.05, 256), (10, 4, 4), (10, 0, 0),
    ):  # fmt: skip
        rest, held = hold_out(list(range(count)), heldout)
        assert len(held) == expected
        assert rest + held == list(range(count))
    for count, heldout in ((1, 0.5), (5, 5), (5, -1), (5, 1.5)):
        with pytest.raises(ValueError, match=r"data\.heldout"):
            hold_out(list(range(count)), heldout)


def sample(ids: list[int], prompt: int) -> Sample:
    return Sample(np.array(ids, dtype=np.int32), np.arange(len(ids)) >= prompt)


def test_prompts_of_what_is_held_out():
    """Each once, no training prompt, none too long, and no plain text."""
    held = [sample([1, 2, 9], 2), sample([1, 2, 8], 2), sample([3, 4, 7], 2), sample([5, 6], 0), sample([1] * 9, 8)]
    assert beginnings(held, [sample([3, 4, 5], 2)], longest=5) == [[1, 2]]


def test_the_interval_of_tau_is_that_of_drawn_prompts():
    traces = [RowTrace(emitted=row.tolist()) for row in np.random.default_rng(1).integers(1, 5, (40, 20))]
    found = measured_tau(traces)
    assert found["tau_low"] < found["tau"] == tau(traces) < found["tau_high"]
    # For rows of equal length tau is the mean of the rows' own.
    own = np.array([tau([trace]) for trace in traces])
    half = 1.96 * own.std() / len(own) ** 0.5
    assert found["tau_high"] - found["tau_low"] == pytest.approx(2 * half, rel=0.15)
    assert set(measured_tau([traces[0]] * 5).values()) == {tau(traces[:1])}
    assert measured_tau(traces[:1]) == {"tau": tau(traces[:1])}


def test_a_run_that_decodes_nothing_is_warned_of(capsys):
    for prompts, decoding, warned in ((None, None, False), ("heldout", None, True), ("heldout", object(), False)):
        warn_of_prompts(SimpleNamespace(config=SimpleNamespace(prompts=prompts), decoding=decoding))
        assert ("warning: tau will not be measured" in capsys.readouterr().out) == warned


def test_too_many_epochs_are_warned_of(capsys):
    data = Batches([sample([1, 2, 3], 1)] * 4, batch_tokens=12, seed=0)
    assert len(data.epoch(0)) == 1
    for steps in (40, 45):
        warn_of_epochs(SimpleNamespace(config=TrainerConfig(steps=steps), processes=Processes(), data=data))
    warning = "warning: 45 steps are 45 passes over 4 conversations, which will be learnt by heart"
    said = capsys.readouterr().out
    assert (said.count("warning: "), said.count(warning)) == (1, 1)
