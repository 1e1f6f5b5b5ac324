"""Stages with time limits, and the GPU proof that is made of them: its parts that need no GPU, on small models."""

import itertools
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from helpers import is_running, refused, run_here

from scripts import gpu_proof, pretrain_target
from specdec.lab.bench import gpu_stages, stages
from specdec.lab.bench.stages import Stage, packer, run_stage, run_stages
from specdec.model.loader import load_target
from specdec.text import read_prompts

ROOT = Path(__file__).parents[2]


def program(code: str, name: str = "a", **settings) -> Stage:
    return Stage(name, [sys.executable, "-c", code], **settings)


# Stages


def test_a_stage_ends_and_its_result_is_read(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"old": 1}')
    for stage, expected in (
        (program("print('words')\nprint('{\"tau\": 3}')"), ("done", 0, {"tau": 3}, 'words\n{"tau": 3}\n')),
        (program("import sys; sys.exit('no luck')"), ("failed", 1, None, "no luck\n")),
        (program("", result=path), ("done", 0, None, "")),  # an old file is no result
        (program(f"open({str(path)!r}, 'w').write('[1]')", result=path), ("done", 0, [1], "")),
    ):
        record = run_stage(stage, 30, tmp_path)
        assert tuple(record[key] for key in ("outcome", "exit_code", "result", "output_tail")) == expected


CHILD = """
import subprocess, sys
from pathlib import Path
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
Path(sys.argv[1]).write_text(str(child.pid))
try:
    child.wait()
except KeyboardInterrupt:
    print('{"partial": true}')
    sys.exit(130)
"""


def test_a_time_limit_interrupts_a_stage_and_its_children(tmp_path, monkeypatch):
    stage = Stage("a", [sys.executable, "-c", CHILD, str(tmp_path / "pid")], ends_itself=False)
    record = run_stage(stage, 2, tmp_path)
    assert (record["outcome"], record["result"]) == ("done", {"partial": True})
    assert not is_running((tmp_path / "pid").read_text())
    monkeypatch.setattr(stages, "GRACE", 0.2)
    stubborn = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)"
    record = run_stage(program(stubborn), 1, tmp_path)
    assert (record["outcome"], record["exit_code"]) == ("out of time", -9)


def test_stages_that_need_not_or_cannot_run(tmp_path):
    there, absent = tmp_path / "there", tmp_path / "absent"
    there.touch()
    for settings, limit, reason in (
        ({"makes": there}, 30, "there is there already"),
        ({"needs": (there, absent)}, 30, f"{absent} is missing"),
        ({"void": "no GPU"}, 30, "no GPU"),
        ({}, 0, "no time is left"),
    ):
        record = run_stage(program("", **settings), limit, tmp_path)
        assert record["outcome"] == ("kept" if "makes" in settings else "skipped")
        assert record["reason"].endswith(reason)
    assert run_stage(program("", makes=absent), 30, tmp_path)["outcome"] == "failed"


def test_time_is_shared_and_logs_are_kept(tmp_path):
    say = [sys.executable, "-c", "import sys; print(sys.argv[1:], 'x' * 9000)", "a={limit}", "b={budget}"]
    every = [Stage("a", say, 8.0), program("", seconds=1000.0, void="no GPU"), Stage("b c", say, 45.0)]
    every += [Stage("d", say, 45.0), program("import sys; sys.exit(1)", name="e", seconds=50.0)]
    records = []
    run_stages(every, 148, records.append, tmp_path)
    assert [r["outcome"] for r in records] == ["done", "skipped", "done", "done", "failed"]
    limits = [r["limit_seconds"] for r in records]
    assert (tmp_path / "a.log").read_text() == f"['a=8', 'b=6'] {'x' * 9000}\n"
    assert (tmp_path / "b_c.log").exists()
    assert 45 < limits[2] < 48.3  # the time that the first did not need is shared out again
    assert limits[2] < limits[3]
    assert 120 < limits[4] < 148


CUT = """
import sys
from pathlib import Path
from specdec.lab.bench import stages
results = Path(sys.argv[1])
cases = "import os, time; from specdec.cli.files import write_text; from pathlib import Path\\n"
cases += "for i in range(100):\\n    write_text(Path(r'%s', 'cases.json'), str([os.getpid(), *range(i)]))\\n" % results
cases += "    print('case', i)\\n    time.sleep(0.05)"
stages.TICK = 0.1
stage = stages.Stage("cases", [sys.executable, "-c", cases])
stages.run_stages([stage], 60, print, results, tick=stages.packer(results, Path(sys.argv[2])))
"""


def measured(path: Path) -> list[int]:
    """Return the cases that an archive holds, after the process id; it is whole whenever it exists."""
    if not path.exists():
        return []
    with tarfile.open(path) as file:
        found = "results/cases.json" in file.getnames()
        return json.load(file.extractfile("results/cases.json")) if found else []


def test_a_kill_leaves_what_was_measured_and_no_process(tmp_path):
    """The whole process group of the proof is killed in the middle of a stage, as a time limit does it."""
    (tmp_path / "results").mkdir()
    out, deadline = tmp_path / "results.tar.gz", time.monotonic() + 60
    process = subprocess.Popen([sys.executable, "-c", CUT, tmp_path / "results", out], cwd=ROOT, process_group=0)
    while len(measured(out)) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    child, *cases = measured(out)
    assert 3 <= len(cases) < 99
    while is_running(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_archive_keeps_the_end_of_a_long_log(tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "LOG_BYTES", 10)
    for name, text in (("a.log", "0123456789the end"), ("a.json", f'"{"x" * 30}"'), ("b.json.partial", "half")):
        (tmp_path / name).write_text(text)
    path = tmp_path / "all.tar.gz"
    pack = packer(tmp_path, path)
    pack()
    with tarfile.open(path) as file:
        assert sorted(file.getnames()) == ["results/a.json", "results/a.log"]
        assert file.extractfile("results/a.log").read() == b"789the end"
    before = path.stat().st_mtime_ns
    pack()
    assert path.stat().st_mtime_ns == before


# Outcomes of tests

TESTS = """
import sys, types
import pytest

torch = sys.modules["torch"] = types.ModuleType("torch")
torch.lost = False

def synchronize():
    if torch.lost:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

torch.cuda = types.SimpleNamespace(is_initialized=lambda: True, synchronize=synchronize)

@pytest.mark.parametrize("number", range(9))
def test_a_kernel(number):
    print("number", number)
    torch.lost |= number == 4
    torch.cuda.synchronize()
    assert number != 7, "off by one"
"""


def test_one_lost_device_is_one_failure(tmp_path):
    """Its process is replaced, and the remaining tests run in another."""
    (tmp_path / "test_some.py").write_text(TESTS)
    file = tmp_path / "outcomes.json"
    words = ["-p", "specdec.lab.bench.outcomes", "--outcomes", file, "-n", "1", "--dist", "worksteal", "-c", os.devnull]
    command = [sys.executable, "-m", "pytest", "-p", "xdist", *words, "--rootdir", tmp_path, "test_some.py"]
    how = {"cwd": tmp_path, "env": os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}}
    done = subprocess.run(command, **how, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    reason = json.loads(file.read_text())
    assert reason["complete"]
    assert reason["counts"] == {"passed": 7, "failed": 2}
    (kernel, crash), (value,) = (
        [failure for failure in reason["failures"] if failure["test"].endswith(f"[{number}]")] for number in (4, 7)
    )
    assert "illegal memory access" in kernel["text"]
    assert kernel["Captured stdout call"] == "number 4\n"
    assert "crashed while running" in crash["text"]
    assert "off by one" in value["text"]


# The proof


def test_a_target_from_scratch(monkeypatch, tmp_path):
    talks = [(f"What is {i}?", "A number. " * (i % 7)) for i in range(1, 600)]
    rows = [{"conversations": [{"from": "human", "value": a}, {"from": "gpt", "value": b}]} for a, b in talks]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--data", tmp_path / "c.jsonl", "--device", "cpu", *gpu_stages.TINY.target.split(), "--length", 128]

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
    by_part = gpu_stages.Proof("cpu", tmp_path, tmp_path, None, gpu_stages.TINY).parts()
    assert list(by_part) == ["tests", "shape", "train", "kernels", "transformers"]
    chosen = [stage.name for stage in gpu_proof.choose(by_part, "pair,shape,tests")]
    assert chosen == ["tests", "rounds tiny", "bench tiny", "pair"]
    assert len(gpu_proof.choose(by_part, None)) == sum(map(len, by_part.values()))
    out = tmp_path / "results"
    monkeypatch.setattr(gpu_proof, "set_environment", lambda work: None)
    words = ["--tiny", "--minutes", 2, "--stages", "train", "--work", tmp_path / "work", "--out", out]
    run_here(gpu_proof.main, "--device", "cpu", *map(str, words))
    summary = json.loads((out / "gpu_proof.json").read_text())
    reasons = {stage["stage"]: stage["reason"] for stage in summary["stages"]}
    assert list(reasons) == ["target", "answers", "drafter", "tau", "tau of a chain", "pair"]
    assert {stage["outcome"] for stage in summary["stages"]} == {"skipped"}
    assert reasons["target"] == "no --conversations were given"
    assert {"machine", "versions", "command", "revision", "tiny"} <= set(summary)
    with tarfile.open(out / "results.tar.gz") as file:
        assert "--steps 3" in json.load(file.extractfile("results/stage_tau_of_a_chain.json"))["command"]


@pytest.mark.parametrize("sizes", [gpu_stages.Sizes(), gpu_stages.TINY], ids=["real", "tiny"])
def test_every_stage_is_a_command_that_exists(sizes, tmp_path):
    for part, every in gpu_stages.Proof("cuda", tmp_path, tmp_path, tmp_path, sizes).parts().items():
        assert sum(stage.seconds for stage in every) <= 540, part  # nine minutes
        for stage in every:
            first, module = stage.command[1:3]
            path = Path(module.replace(".", "/")) if first == "-m" else Path(first)
            assert any((ROOT / p).exists() for p in (path, path.with_suffix(".py"))) or str(path) == "pytest"
    assert all((ROOT / "conf" / "shape" / f"{shape}.yaml").is_file() for shape in (*sizes.shapes, *sizes.against))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--stages", "moon"], "there is no part and no stage 'moon': there are tests: tests; shape: rounds"),
        (["--minutes", "0"], "--minutes must be positive"),
        (["--conversations", "nowhere.jsonl"], "no such data file: nowhere.jsonl"),
        (["--device", "abacus"], "device 'abacus' cannot be used here"),
    ],
)
def test_mistakes_are_one_sentence(monkeypatch, tmp_path, words, message):
    monkeypatch.chdir(tmp_path)
    assert message in refused(gpu_proof.main, "--device", "cpu", *words)
