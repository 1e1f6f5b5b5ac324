"""The GPU proof: stages with time limits, and its parts that need no GPU, on small models."""

import argparse
import itertools
import json
import shlex
import time
from pathlib import Path

import pytest
from helpers import is_running, refused, run_here

from scripts import gpu_proof, pretrain_target
from scripts.gpu_proof import Stage, run_stage, run_stages
from specdec.model.loader import load_target
from specdec.text import read_prompts

ROOT = Path(__file__).parents[2]


def options(folder: Path, **changes) -> argparse.Namespace:
    given = {"device": "cpu", "tiny": True, "work": folder, "out": folder, "conversations": None, "minutes": 1.0}
    return argparse.Namespace(**given | changes)


def program(code: str, name: str = "a", seconds: float = 1.0, **settings) -> Stage:
    return Stage(name, seconds, f"-c {shlex.quote(code)}", **settings)


def test_a_stage_ends_and_its_output_is_on_disk(tmp_path):
    args = options(tmp_path / "out folder")
    args.out.mkdir()
    for code, *ended in (("print('words')", "done", 0, "words"), ("exit('no luck')", "failed", 1, "no luck")):
        record = run_stage(program(code, name="a b"), 30, args)
        assert [record["outcome"], record["exit_code"], record["last_line"]] == ended
        assert (args.out / "a_b.log").read_text() == f"{ended[-1]}\n"
    record = run_stage(Stage("c", 1, "-c 'import sys; print(sys.argv[1:])' {result} {limit} {budget}"), 40, args)
    assert record["last_line"] == str([str(args.out / "c.json"), "40", "30"])


CHILD = """
import subprocess, sys
from pathlib import Path
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
Path(sys.argv[1]).write_text(str(child.pid))
try:
    child.wait()
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_a_time_limit_interrupts_a_stage_and_its_children(tmp_path, monkeypatch):
    record = run_stage(Stage("a", 1, f"-c {shlex.quote(CHILD)} {{out}}/pid", ends_itself=False), 3, options(tmp_path))
    assert record["outcome"] == "done"
    deadline = time.monotonic() + 10  # the child got the same interrupt, and may end after its parent
    while is_running(pid := (tmp_path / "pid").read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(pid)
    monkeypatch.setattr(gpu_proof, "GRACE", 0.2)
    stubborn = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)"
    assert run_stage(program(stubborn), 1, options(tmp_path))["outcome"] == "out of time"


def test_stages_that_need_not_or_cannot_run(tmp_path):
    there, absent = tmp_path / "there", tmp_path / "absent"
    there.touch()
    for settings, limit, reason in (
        ({"makes": there}, 30, "there is there already"),
        ({"needs": (there, absent)}, 30, f"{absent} is missing"),
        ({"needs": (None,)}, 30, "no --conversations were given"),
        ({}, 0, "no time is left"),
    ):
        record = run_stage(program("", **settings), limit, options(tmp_path))
        assert record["outcome"] == ("kept" if "makes" in settings else "skipped")
        assert record["reason"].endswith(reason)
    assert run_stage(program("", makes=absent), 30, options(tmp_path))["outcome"] == "failed"


def test_time_is_shared(tmp_path):
    there = tmp_path / "there"
    there.touch()
    every = [program("", seconds=8.0), program("", seconds=1000.0, makes=there), program("", "b", seconds=45.0)]
    every += [program("", "c", seconds=45.0), program("import sys; sys.exit(1)", "d", seconds=50.0)]
    records = run_stages(every, {"tiny": True}, options(tmp_path, minutes=148 / 60))
    assert [r["outcome"] for r in records] == ["done", "kept", "done", "done", "failed"]
    limits = [r["limit_seconds"] for r in records]
    assert 45 < limits[2] < 48.3  # the time that the first did not need is shared out again
    assert limits[2] < limits[3]
    assert 120 < limits[4] < 148
    assert json.loads((tmp_path / "gpu_proof.json").read_text()) == {"tiny": True, "stages": records}


# The proof


def test_a_target_from_scratch(monkeypatch, tmp_path):
    talks = [(f"What is {i}?", "A number. " * (i % 7)) for i in range(1, 600)]
    rows = [{"conversations": [{"from": "human", "value": a}, {"from": "gpt", "value": b}]} for a, b in talks]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--data", tmp_path / "c.jsonl", "--device", "cpu", *gpu_proof.TINY["target"].split(), "--length", 128]

    def pretrain(out: Path, *more: object) -> dict:
        done = run_here(pretrain_target.main, *map(str, (*words, "--out", out, *more)))
        return json.loads(done.stdout.strip().splitlines()[-1])

    report = pretrain(tmp_path / "a", "--tokens", 6000)
    assert report["tokens"] == 5120  # five batches of 1024
    assert report["heldout_loss"] < 5.7  # log of the vocabulary is 5.77
    assert load_target(tmp_path / "a" / "target").config.context == 128
    prompts, heldout = (set(read_prompts(tmp_path / "a" / f"{name}.jsonl")) for name in ("prompts", "heldout"))
    assert (len(heldout), len(prompts) > 100, prompts & heldout) == (2, True, set())
    for folder, more, message in (
        ("a", ["--tokens", 6000], "holds a target already"),
        ("b", ["--seconds", 0.001], "give more --seconds"),
    ):
        assert message in refused(pretrain_target.main, *words, "--out", tmp_path / folder, *more)
    ticks = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: float(next(ticks)))  # a second passes with each look at the clock
    report = pretrain(tmp_path / "c", "--seconds", 40, "--batch-tokens", 128)
    assert 0 < report["tokens"] < report["tokens_in_data"]


def test_parts_and_stages_are_chosen_by_name_and_those_that_cannot_run_are_reported(monkeypatch, tmp_path):
    by_part = gpu_proof.parts(options(tmp_path))
    assert list(by_part) == ["tests", "shape", "train", "kernels", "transformers"]
    chosen = [stage.name for stage in gpu_proof.choose(by_part, "bench pair,shape,tests")]
    assert chosen == ["tests", "bench tiny", "bench pair"]
    assert len(gpu_proof.choose(by_part, None)) == sum(map(len, by_part.values()))
    out = tmp_path / "results"
    monkeypatch.setattr(gpu_proof, "set_environment", lambda work: None)
    words = ["--tiny", "--minutes", 2, "--stages", "train", "--work", tmp_path / "work", "--out", out]
    run_here(gpu_proof.main, "--device", "cpu", *map(str, words))
    summary = json.loads((out / "gpu_proof.json").read_text())
    reasons = {stage["stage"]: stage["reason"] for stage in summary["stages"]}
    assert list(reasons) == ["target", "answers", "drafter", "tau", "tau of a chain", "bench pair"]
    assert {stage["outcome"] for stage in summary["stages"]} == {"skipped"}
    assert reasons["target"] == "no --conversations were given"
    assert {"machine", "versions", "command", "revision", "tiny"} <= set(summary)


@pytest.mark.parametrize("tiny", [False, True], ids=["real", "tiny"])
def test_every_stage_is_a_command_that_exists(tiny, tmp_path):
    for part, every in gpu_proof.parts(options(tmp_path, tiny=tiny)).items():
        assert sum(stage.seconds for stage in every) <= 540, part  # nine minutes
        for stage in every:
            first, module, *words = shlex.split(stage.command)
            path = Path(module.replace(".", "/")) if first == "-m" else Path(first)
            assert any((ROOT / p).exists() for p in (path, path.with_suffix(".py"))) or str(path) == "pytest"
            shapes = [word.removeprefix("shape=") for word in words if word.startswith("shape=")]
            assert all((ROOT / "conf" / "shape" / f"{shape}.yaml").is_file() for shape in shapes)
