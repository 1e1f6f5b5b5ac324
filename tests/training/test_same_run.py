"""A run that goes on: other settings are told or refused, and a signal ends the process with its own exit code."""

import json
import os
import signal

import pytest
from test_cache import CONVERSATIONS, composed

from specdec.training import train
from specdec.training.loop.checkpoint import checkpoints
from specdec.training.loop.trainer import Trainer

SMALL = (
    "trainer.steps=3", "trainer.batch_tokens=100", "trainer.prompts=null", "trainer.eval_batches=1",
    "objective.steps=2", "data.heldout=4",
)  # fmt: skip


@pytest.fixture
def begun(target_path, tmp_path, monkeypatch, capsys):
    """A function that runs with changes, and returns its exit code and standard error, in a folder in which a run was
    stopped by `number` after its second step."""
    data, out = tmp_path / "data.jsonl", tmp_path / "run"
    data.write_text("".join(json.dumps({"messages": c}) + "\n" for c in CONVERSATIONS))

    def run(*changes):
        settings = composed("train", f"target.path={target_path}", f"data.path={data}", f"out={out}", *SMALL, *changes)
        try:
            train.run(settings)
            code = 0
        except SystemExit as stopped:
            code = stopped.code
        return code, capsys.readouterr().err

    def begin(number):
        def step(self, group, original=Trainer._step):
            if self.step == 1:
                os.kill(os.getpid(), number)
            return original(self, group)

        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "_step", step)
            code, err = run()
        assert "stopped after step 2; resume=true goes on" in err
        assert [path.name for path in checkpoints(out)] == ["step-00000002.pt"]
        return code

    run.begin, run.data = begin, data
    return run


def test_a_signal_saves_and_other_settings_are_told_or_refused(begun):
    assert begun.begin(signal.SIGINT) == 130
    code, err = begun("resume=true", "trainer.lr=0.5", "drafter.init=random", "trainer.log_every=1")
    assert code == 2
    assert (
        "holds a run of other settings: drafter.init was 'target' and is 'random'; trainer.lr was 0.001 and is 0.5:"
        in err
    )
    assert "log_every" not in err
    code, err = begun("resume=true", "trainer.accumulate=2")
    assert code == 2
    assert "took 1 batches a step, and this run takes 2" in err
    lines = begun.data.read_text().splitlines()
    begun.data.write_text("\n".join([*lines[1:], lines[0]]))
    code, err = begun("resume=true")
    assert code == 2
    assert "has learnt other conversations than data.path gives now" in err
    begun.data.write_text("\n".join(lines))
    code, err = begun("resume=true", "trainer.log_every=3")
    assert code == 0
    assert "note: trainer.log_every was 1 and is 3\n" in err


def test_sigterm_exits_with_its_own_code(begun):
    assert begun.begin(signal.SIGTERM) == 143
