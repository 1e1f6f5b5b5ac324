"""Stages with time limits, and the GPU proof that is made of them: its parts that need no GPU, on small models."""

import itertools
import json
import os
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest

from lab.bench import stages
from lab.bench.stages import Stage, run_stage, run_stages
from scripts import gpu_proof, pretrain_target
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
    every = [
        Stage(str(i), [sys.executable, "-c", say, "a={limit}", "b={budget}"], share)
        for i, share in enumerate((0.1, None, None))
    ]
    run_stages([*every, program("import sys; sys.exit(1)", share=0.5)], 100, records.append)
    assert [r["outcome"] for r in records] == ["done", "done", "done", "failed"]
    assert records[0]["limit_seconds"] == 10
    assert records[0]["output_tail"] == "['a=10', 'b=8']\n"  # 7.5, rounded to even
    assert 40 < records[1]["limit_seconds"] <= 50  # what is left, for two
    assert records[1]["limit_seconds"] < records[2]["limit_seconds"]


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
        *gpu_proof.TINY.target.split(),
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


def test_stages_without_a_gpu(monkeypatch, tmp_path, capsys):
    out = tmp_path / "results"
    words = ["--device", "cpu", "--tiny", "--work", tmp_path / "work", "--out", out, "--minutes", "2"]
    proof(monkeypatch, *words, "--stages", "target,tau,kernels")
    summary = json.loads((out / "gpu_proof.json").read_text())
    reasons = {stage["stage"]: stage["reason"] for stage in summary["stages"]}
    assert {stage["outcome"] for stage in summary["stages"]} == {"skipped"}
    assert reasons["target"] == "no --conversations were given"
    assert reasons["tau"].endswith("target is missing")
    assert reasons["kernels"] == "the kernels' benchmark needs a GPU"
    assert {"machine", "versions", "command", "revision", "tiny"} <= set(summary)
    assert json.loads((out / "stage_kernels.json").read_text())["command"].endswith("kernels.json")
    assert json.loads(capsys.readouterr().out.strip().splitlines()[-1])["outcomes"]["tau"] == "skipped"


def test_every_stage_is_a_command_that_there_is(tmp_path):
    args = Namespace(device="cuda", conversations=tmp_path, work=tmp_path, out=tmp_path)
    for sizes in (gpu_proof.Sizes(), gpu_proof.TINY):
        every = [
            gpu_proof.test_stage(sizes),
            *gpu_proof.pair_stages(args, sizes),
            *gpu_proof.machine_stages(args, sizes),
        ]
        assert sum(stage.share or 0 for stage in every) < 0.9  # the shapes have the rest
        for stage in every:
            first = stage.command[1]
            path = Path(stage.command[2].replace(".", "/")) if first == "-m" else Path(first)
            assert any((ROOT / p).exists() for p in (path, path.with_suffix(".py"))) or str(path) == "pytest"
        shapes = {stage.name.removeprefix("bench ") for stage in every if stage.name.startswith("bench ")}
        assert all((ROOT / "conf" / "shape" / f"{shape}.yaml").is_file() for shape in shapes)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--stages", "moon"], "there is no stage 'moon': there are tests, target"),
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
