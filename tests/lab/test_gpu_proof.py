"""Stages with time limits, and the GPU proof that is made of them: its parts that need no GPU, on small models."""

import itertools
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from argparse import Namespace
from pathlib import Path

import pytest

from scripts import gpu_proof, pretrain_target
from specdec.lab.bench import archive, gpu_stages, stages
from specdec.lab.bench.stages import Stage, run_stage, run_stages
from specdec.model.loader import load_target
from specdec.text import read_prompts

ROOT = Path(__file__).parents[2]


def program(code: str, name: str = "a", **settings) -> Stage:
    return Stage(name, [sys.executable, "-c", code], **settings)


# Stages


def test_a_stage_that_ends_well():
    record = run_stage(program("print('words')\nprint('{\"tau\": 3}')"), 30)
    assert record["outcome"] == "done"
    assert record["result"] == {"tau": 3}
    assert record["exit_code"] == 0
    assert "words" in record["output_tail"]


def test_a_stage_that_fails_keeps_its_words():
    record = run_stage(program("import sys; print('no luck', file=sys.stderr); sys.exit(2)"), 30)
    assert (record["outcome"], record["exit_code"], record["result"]) == ("failed", 2, None)
    assert record["output_tail"] == "no luck\n"


def test_time_that_is_over_interrupts_it_and_its_children(tmp_path):
    child = "import time; time.sleep(60)"
    code = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {child!r}])
open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
try:
    child.wait()
except KeyboardInterrupt:
    print('{{"partial": true}}')
    sys.exit(130)
"""
    start = time.monotonic()
    record = run_stage(program(code), 3)
    assert time.monotonic() - start < 20
    assert record["outcome"] == "out of time"
    assert record["result"] == {"partial": True}
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    meant = program(code, ends_itself=False)
    assert run_stage(meant, 3)["outcome"] == "done"


def test_who_does_not_stop_is_killed(monkeypatch):
    monkeypatch.setattr(stages, "GRACE", 0.5)
    code = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('on', flush=True); time.sleep(60)"
    record = run_stage(program(code), 2)
    assert record["outcome"] == "out of time"
    assert record["exit_code"] == -9


def test_what_need_not_or_cannot_run(tmp_path):
    there = tmp_path / "there"
    there.touch()
    assert run_stage(program("", makes=there), 30)["outcome"] == "kept"
    assert run_stage(program("", makes=tmp_path / "never"), 30)["outcome"] == "failed"
    record = run_stage(program("", needs=(there, tmp_path / "absent")), 30)
    assert (record["outcome"], record["reason"]) == ("skipped", f"{tmp_path / 'absent'} is missing")
    assert run_stage(program("", void="no GPU"), 30)["reason"] == "no GPU"
    assert run_stage(program(""), 0)["reason"] == "no time is left"


def test_a_result_file_is_read_and_an_old_one_is_not(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"old": 1}')
    assert run_stage(program("", result=path), 30)["result"] is None
    assert run_stage(program(f"open({str(path)!r}, 'w').write('[1]')", result=path), 30)["result"] == [1]


def test_time_is_shared_and_told():
    say = "import sys; print(sys.argv[1:])"
    records = []
    ways = {"a": 8.0, "b": 45.0, "c": 45.0}
    every = [Stage(name, [sys.executable, "-c", say, "a={limit}", "b={budget}"], s) for name, s in ways.items()]
    every.insert(1, program("", name="void", seconds=1000.0, void="no GPU"))  # what cannot run gets none of it
    run_stages([*every, program("import sys; sys.exit(1)", seconds=50.0)], 148, records.append)
    assert [r["outcome"] for r in records] == ["done", "skipped", "done", "done", "failed"]
    limits = [r["limit_seconds"] for r in records]
    assert limits[0] == 8
    assert records[0]["output_tail"] == "['a=8', 'b=6']\n"
    assert 45 < limits[2] < 48.3  # 45 of 140 of what is left by now: what the first did not need is shared out again
    assert limits[2] < limits[3]
    assert 120 < limits[4] < 148


def test_logs_are_kept_whole(tmp_path):
    run_stages([program("print('x' * 9000)", name="a b")], 60, lambda record: None, logs=tmp_path)
    assert (tmp_path / "a_b.log").read_text() == "x" * 9000 + "\n"


CASES = """
import os, sys, time
from pathlib import Path
from specdec.cli.files import write_text
here = Path(sys.argv[1])
write_text(here / "pid.json", str(os.getpid()))
for i in range(100):
    write_text(here / "cases.json", str(list(range(i))))
    print("case", i)
    time.sleep(0.05)
"""
CUT = """
import sys
from pathlib import Path
from specdec.lab.bench import archive, gpu_stages, stages
from specdec.lab.bench.archive import Archive
results, out = map(Path, sys.argv[1:3])
stages.TICK = 0.1
stage = stages.Stage("cases", [sys.executable, "-c", sys.argv[3], str(results)])
stages.run_stages([stage], 60, print, logs=results, tick=Archive(results, out).pack)
"""


def test_a_kill_leaves_what_was_measured_and_no_process(tmp_path):
    """The whole process group of the proof is killed in the middle of a stage, as a time limit does it."""
    results, out = tmp_path / "results", tmp_path / "results.tar.gz"
    results.mkdir()
    command = [sys.executable, "-c", CUT, str(results), str(out), CASES]
    process = subprocess.Popen(command, cwd=ROOT, process_group=0)
    deadline = time.monotonic() + 60
    while measured(out) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert 3 <= measured(out) < 99
    with tarfile.open(out) as file:
        assert b"case 2" in file.extractfile("results/cases.log").read()
    child = Path("/proc") / (results / "pid.json").read_text() / "stat"
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(child)


def measured(path: Path) -> int:
    """How many cases an archive holds; it is whole whenever it is there."""
    if not path.exists():
        return 0
    with tarfile.open(path) as file:
        if "results/cases.json" not in file.getnames():
            return 0
        return len(json.load(file.extractfile("results/cases.json")))


def is_running(stat: Path) -> bool:
    try:
        return stat.read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_an_archive_keeps_the_end_of_a_long_log(tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "LOG_BYTES", 10)
    (tmp_path / "a.log").write_text("0123456789" * 3 + "the end")
    (tmp_path / "a.json").write_text('"' + "0123456789" * 3 + '"')
    (tmp_path / "b.json.partial").write_text("half")
    kept = archive.Archive(tmp_path, tmp_path / "all.tar.gz")
    kept.pack()
    with tarfile.open(kept.path) as file:
        assert sorted(file.getnames()) == ["results/a.json", "results/a.log"]
        assert file.extractfile("results/a.log").read() == b"789the end"
        assert len(json.load(file.extractfile("results/a.json"))) == 30
    before = kept.path.stat().st_mtime_ns
    kept.pack()
    assert kept.path.stat().st_mtime_ns == before


# Outcomes of tests

TESTS = """
import sys
import types

import pytest


class Cuda:
    lost = False

    def is_initialized(self):
        return True

    def synchronize(self):
        if self.lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


torch = sys.modules["torch"] = types.ModuleType("torch")
torch.cuda = Cuda()


@pytest.mark.parametrize("number", range(9))
def test_a_kernel(number):
    print("number", number)
    torch.cuda.lost |= number == 4
    torch.cuda.synchronize()


@pytest.mark.skip
def test_later():
    pass


def test_a_value():
    assert 1 == 2, "off by one"
"""


def test_one_lost_device_is_one_failure(tmp_path):
    """Its process is replaced, and the tests that it still had run in another."""
    (tmp_path / "test_some.py").write_text(TESTS)
    file = tmp_path / "outcomes.json"
    words = ["-p", "specdec.lab.bench.outcomes", "--outcomes", file, "-n", "1", "--dist", "worksteal", "-c", os.devnull]
    command = [sys.executable, "-m", "pytest", *map(str, words), "--rootdir", str(tmp_path), "test_some.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    told = json.loads(file.read_text())
    assert told["complete"]
    assert told["counts"] == {"passed": 8, "failed": 2, "skipped": 1}
    failures: dict[str, list[dict]] = {}
    for failure in told["failures"]:
        failures.setdefault(failure["test"].split("::")[1], []).append(failure)
    assert set(failures) == {"test_a_kernel[4]", "test_a_value"}
    kernel, crash = failures["test_a_kernel[4]"]
    assert "illegal memory access" in kernel["text"]
    assert kernel["Captured stdout call"] == "number 4\n"
    assert "crashed while running" in crash["text"]
    assert "off by one" in failures["test_a_value"][0]["text"]


# The proof


@pytest.fixture
def conversations(tmp_path):
    rows = [
        {
            "conversations": [
                {"from": "human", "value": f"What is {i}?"},
                {"from": "gpt", "value": "A number. " * (i % 7)},
            ]
        }
        for i in range(1, 600)
    ]
    path = tmp_path / "conversations.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def proof(monkeypatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_proof.py", *map(str, words)])
    gpu_proof.main()


def test_a_target_from_scratch(monkeypatch, tmp_path, conversations, capsys):
    out = tmp_path / "pair"
    words = [
        "--data",
        conversations,
        "--out",
        out,
        "--seconds",
        "60",
        "--device",
        "cpu",
        *gpu_stages.TINY.target.split(),
    ]
    words += ["--tokens", "6000", "--length", "128"]
    monkeypatch.setattr(sys, "argv", ["pretrain_target.py", *map(str, words)])
    pretrain_target.main()
    report = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert report["tokens"] == 5120  # five batches of 1024
    assert report["heldout_loss"] < 5.7  # log of the vocabulary is 5.77
    target = load_target(out / "target")
    assert (target.config.layers, target.config.context) == (4, 128)
    prompts, heldout = (set(read_prompts(out / f"{name}.jsonl")) for name in ("prompts", "heldout"))
    assert len(heldout) == 2
    assert len(prompts) > 100
    assert not prompts & heldout
    with pytest.raises(SystemExit):
        pretrain_target.main()
    assert "holds a target already" in capsys.readouterr().err


def test_prompts_that_leave_no_room_for_an_answer_are_left_out():
    def tokenizer(text: str) -> dict:
        return {"input_ids": text.split()}

    assert pretrain_target.short_prompts(tokenizer, ["a b c", "a", "a b"], 2) == ["a", "a b"]
    with pytest.raises(ValueError, match="more than 2 tokens, half of the context"):
        pretrain_target.short_prompts(tokenizer, ["a b c"], 2)


def test_the_time_ends_a_training(monkeypatch, tmp_path, conversations):
    sizes = {"vocab_size": 320, "hidden_size": 64, "layers": 2, "length": 64, "batch_tokens": 128, "prompts": 9}
    args = Namespace(data=conversations, out=tmp_path, tokens=10**9, heldout=2, device="cpu", eager=True, **sizes)
    args.seconds = 0.001
    with pytest.raises(ValueError, match="give more --seconds"):
        pretrain_target.train(args)
    args.seconds = 40.0
    ticks = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: float(next(ticks)))  # a second for each time that it is looked at
    report = pretrain_target.train(args)
    assert 0 < report["tokens"] < report["tokens_in_data"]


def test_stages_that_cannot_run(monkeypatch, tmp_path, capsys):
    out, work = tmp_path / "results", tmp_path / "work"
    words = ["--device", "cpu", "--tiny", "--work", work, "--out", out, "--minutes", "2"]
    monkeypatch.setattr(gpu_proof, "set_environment", lambda work: None)
    proof(monkeypatch, *words, "--stages", "train")
    summary = json.loads((out / "gpu_proof.json").read_text())
    reasons = {stage["stage"]: stage["reason"] for stage in summary["stages"]}
    assert list(reasons) == ["target", "answers", "drafter", "tau", "tau of a chain", "pair"]
    assert {stage["outcome"] for stage in summary["stages"]} == {"skipped"}
    assert reasons["target"] == "no --conversations were given"
    assert reasons["tau"].endswith("target is missing")
    assert {"machine", "versions", "command", "revision", "tiny"} <= set(summary)
    with tarfile.open(out / "results.tar.gz") as file:
        record = json.load(file.extractfile("results/stage_tau_of_a_chain.json"))
    assert "--steps 3" in record["command"]
    assert sorted(path.name for path in out.iterdir()) == ["gpu_proof.json", "results.tar.gz"]
    assert json.loads(capsys.readouterr().out.strip().splitlines()[-1])["outcomes"]["tau"] == "skipped"


def test_parts_and_stages_are_chosen_by_name(tmp_path):
    by_part = gpu_stages.parts(gpu_stages.Place("cpu", tmp_path, tmp_path), gpu_stages.TINY)
    assert list(by_part) == ["tests", "shape", "train", "kernels", "transformers"]

    def names(wanted: str | None) -> list[str]:
        return [stage.name for stage in gpu_proof.choose(by_part, wanted)]

    assert names("transformers,tests") == ["tests", "transformers tiny", "transformers pair"]
    assert names("pair,shape") == ["rounds tiny", "bench tiny", "pair"]
    assert len(names(None)) == sum(map(len, by_part.values()))


def test_every_stage_is_a_command_that_there_is(tmp_path):
    place = gpu_stages.Place("cuda", tmp_path, tmp_path, tmp_path)
    for sizes in (gpu_stages.Sizes(), gpu_stages.TINY):
        for part, every in gpu_stages.parts(place, sizes).items():
            assert sum(stage.seconds for stage in every) <= 540, part  # nine minutes
            for stage in every:
                first = stage.command[1]
                path = Path(stage.command[2].replace(".", "/")) if first == "-m" else Path(first)
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
def test_mistakes_are_one_sentence(monkeypatch, tmp_path, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        proof(monkeypatch, "--device", "cpu", *words)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
