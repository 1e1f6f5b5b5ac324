"""A run that goes on: other settings are told or refused, and a signal ends the process with its own exit code."""

import os
import re
import signal

import pytest
from short_runs import CONVERSATIONS, composed, write_rows

from specdec.training import train
from specdec.training.loop.checkpoint import checkpoints
from specdec.training.loop.trainer import Trainer

SHORT = ("trainer.steps=3", "trainer.batch_tokens=100", "trainer.eval_batches=1", "objective.steps=2", "data.heldout=4")


@pytest.fixture
def begun(target_path, tmp_path, monkeypatch, capsys):
    """A function that runs with changes, and returns its exit code and standard error, in a folder in which a run was
    stopped by `number` after its second step."""
    out = tmp_path / "run"
    data = write_rows(tmp_path / "data.jsonl", *({"messages": c} for c in CONVERSATIONS))

    def run(*changes):
        settings = composed("train", f"target.path={target_path}", f"data.path={data}", f"out={out}", *SHORT, *changes)
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

    run.begin, run.data, run.out = begin, data, out
    return run


def test_a_signal_saves_and_other_settings_are_told_or_refused(begun):
    assert begun.begin(signal.SIGINT) == 130
    code, err = begun("resume=true", "trainer.lr=0.5", "drafter.init=random", "trainer.log_every=2")
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


def test_a_run_of_an_older_version_goes_on(begun):
    """Version 0.1 named classes without the package's name. Settings that are gone change nothing if they were off."""
    assert begun.begin(signal.SIGTERM) == 143
    file = begun.out / "config.yaml"
    old = re.sub(r"_target_: specdec\.", "_target_: ", file.read_text())
    assert "_target_: training.objectives" in old
    file.write_text(old + "gone:\n  and_on: 0.5\n")
    code, err = begun("resume=true")
    assert code == 2
    assert "gone.and_on was 0.5 and is null" in err
    file.write_text(old + "gone:\n  and_off: 0.0\n")
    code, err = begun("resume=true")
    assert (code, "note:" in err) == (0, False)
