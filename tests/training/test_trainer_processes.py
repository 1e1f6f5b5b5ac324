"""Several processes (gloo, CPU) train as one does, and a run that is killed while it saves ends as one left alone."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from safetensors.torch import load_file
from test_training import CONF, CONVERSATIONS
from torch.utils._pytree import tree_flatten

from specdec.training.loop.checkpoint import checkpoints, read_newest
from specdec.training.loop.log import read_log
from specdec.training.loop.parallel import join_processes
from specdec.training.train import run

ROOT = Path(__file__).parents[2]
ENV = os.environ | {"OMP_NUM_THREADS": "1"}
WORKER = """
import os, signal, sys
from hydra import compose, initialize_config_dir
from specdec.cli.signals import StopSignals
from specdec.training.train import run
conf, out, *settings = sys.argv[1:]
with initialize_config_dir(conf, version_base="1.3"):
    for way in ("ddp", "fsdp"):
        how = [f"out={out}/{way}", f"trainer.fsdp={way == 'fsdp'}", "trainer.accumulate=2"]
        run(compose("train", [*settings, *how]))
    enter = StopSignals.__enter__
    def enter_and_ask_one(self):
        entered = enter(self)
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        return entered
    StopSignals.__enter__ = enter_and_ask_one
    run(compose("train", [*settings, f"out={out}/stopped"]))
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    path.write_text("".join(json.dumps({"messages": c}) + "\n" for c in CONVERSATIONS))
    return path


def settings(target_path, data) -> list[str]:
    """Averages and recomputing are on, and some batches count many more positions than others. No Muon: torch's rounds
    to bf16, which makes 1e-4 of 1e-8."""
    return [
        f"target.path={target_path}", f"data.path={data}", "drafter.draft_vocab_size=200", "objective.steps=3",
        "data.heldout=8", "trainer.batch_tokens=100", "trainer.steps=6", "trainer.save_every=3", "trainer.log_every=1",
        "trainer.eval_batches=2", "trainer.ema=0.5", "trainer.recompute=true",
        "trainer=small", "objective=eagle3", "drafter=eagle3",
    ]  # fmt: skip


def train(out: Path, overrides: list[str]) -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        run(compose("train", [*overrides, f"out={out}"]))


def assert_same_run(one: Path, other: Path) -> None:
    rows, others = read_log(one / "log.jsonl"), read_log(other / "log.jsonl")
    assert len(rows) == len(others) == 8
    for a, b in zip(rows, others, strict=True):
        assert (a["split"], a["step"], a["tokens"]) == (b["split"], b["step"], b["tokens"])
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)
        assert a["losses"] == pytest.approx(b["losses"], abs=2e-5)  # rounded to 1e-5 in the log
    weights, others = (load_file(out / "draft" / "model.safetensors") for out in (one, other))
    for name, weight in weights.items():
        torch.testing.assert_close(weight, others[name], rtol=0, atol=1e-4)


def test_two_processes_are_one_of_the_same_global_batch(target_path, data, tmp_path):
    """DDP and FSDP, each process two batches a step, and one process of four; and what two saved, one resumes.
    A signal to one of them stops both."""
    (tmp_path / "worker.py").write_text(WORKER)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launch, str(tmp_path / "worker.py"), str(CONF), str(tmp_path), *settings(target_path, data)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=ENV)
    assert done.returncode == 0, done.stderr
    assert [p.name for p in checkpoints(tmp_path / "stopped")] == ["step-00000001.pt"]
    train(tmp_path / "one", [*settings(target_path, data), "trainer.accumulate=4"])
    for way in ("ddp", "fsdp"):
        assert_same_run(tmp_path / way, tmp_path / "one")
    (tmp_path / "fsdp" / "checkpoints" / "step-00000006.pt").unlink()
    train(tmp_path / "fsdp", [*settings(target_path, data), "trainer.accumulate=4", "resume=true"])
    assert_same_run(tmp_path / "fsdp", tmp_path / "one")


@pytest.mark.parametrize("what", ["FSDP", "DEEPSPEED"])
def test_what_the_launcher_sets_in_our_place_is_refused(monkeypatch, what):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv(f"ACCELERATE_USE_{what}", "true")
    with pytest.raises(ValueError, match=f"the launcher asks for {what}: .*trainer.fsdp=true shards the drafter"):
        join_processes("cpu")


def test_the_command_stops_when_it_is_told_to_and_says_so(target_path, data, tmp_path):
    command = [sys.executable, "-m", "specdec.training.train", *settings(target_path, data), f"out={tmp_path}"]
    command += ["trainer.steps=100000", "trainer.save_every=100000"]
    log = tmp_path / "log.jsonl"
    child = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=ENV, cwd=ROOT)
    deadline = time.monotonic() + 60
    while not (log.exists() and log.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    child.send_signal(signal.SIGTERM)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 128 + signal.SIGTERM, err
    steps = [row["step"] for row in read_log(log)]
    assert f"stopped after step {steps[-1]}; resume=true goes on from there" in err
    assert [p.name for p in checkpoints(tmp_path)] == [f"step-{steps[-1]:08d}.pt"]


DIES_WHILE_SAVING = """
import io, os, signal, sys
import torch
from hydra import compose, initialize_config_dir
from specdec.training.train import run
save, calls = torch.save, []
def save_and_die(state, file):
    calls.append(1)
    if len(calls) < 2:
        return save(state, file)
    buffer = io.BytesIO()
    save(state, buffer)
    file.write(buffer.getvalue()[: buffer.tell() // 2])
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
torch.save = save_and_die
with initialize_config_dir(sys.argv[1], version_base="1.3"):
    run(compose("train", sys.argv[2:]))
"""


def test_a_run_killed_while_it_saves_ends_as_one_left_alone(target_path, data, tmp_path):
    overrides = [*settings(target_path, data), "trainer.save_every=2", "trainer.eval_batches=1"]
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    command = [sys.executable, "-c", DIES_WHILE_SAVING, str(CONF), *overrides, f"out={cut}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=ENV, cwd=ROOT)
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    assert [path.name for path in checkpoints(cut)] == ["step-00000002.pt"]
    train(cut, [*overrides, "resume=auto"])
    train(whole, overrides)
    times = ("seconds", "rollout_seconds")
    logs = [
        [{k: v for k, v in row.items() if k not in times} for row in read_log(o / "log.jsonl")] for o in (cut, whole)
    ]
    assert logs[0] == logs[1]
    (leaves, spec), (others, other_spec) = (
        tree_flatten({k: v for k, v in read_newest(out)[1].items() if k not in times}) for out in (cut, whole)
    )
    assert spec == other_spec
    for leaf, other in zip(leaves, others, strict=True):
        assert torch.equal(leaf, other) if isinstance(leaf, torch.Tensor) else leaf == other
    weights = [(out / "draft" / "model.safetensors").read_bytes() for out in (cut, whole)]
    assert weights[0] == weights[1]
