"""Scripts find their own checkout. The GPU proof has stages with time limits; its parts that need no GPU run here on
small models. `check_in_vllm.py` runs with a stand-in for vLLM."""

import copy
import itertools
import json
import os
import runpy
import shlex
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import check_in_vllm
import pytest
from helpers import is_running, refused, run_here

from scripts import gpu_proof, pretrain_target, smollm2_prompts
from scripts.gpu_proof import Stage, run_stage, run_stages
from specdec.api import DEMO_TARGET, load_drafter, load_target
from specdec.lab.output import command_line
from specdec.model.names import bundled_drafts
from specdec.text import read_prompts

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("script", sorted((ROOT / "scripts").glob("*.py")), ids=lambda path: path.stem)
def test_every_script_finds_its_checkout_before_it_imports_from_it(script):
    lines = [line for line in script.read_text(encoding="utf-8").splitlines() if line.startswith(("import ", "from "))]
    ours = [line.split()[1].split(".")[0] for line in lines]
    assert "specdec" not in ours or ours.index("checkout") < ours.index("specdec")


def test_a_script_from_another_folder_and_its_child_import_this_checkout(tmp_path):
    """Without any help from the environment or from what is installed."""
    (tmp_path / "specdec").mkdir()
    (tmp_path / "specdec" / "__init__.py").write_text("raise ImportError('another specdec')")
    child = "import specdec; print(specdec.__file__)"
    code = (
        f"import sys; sys.path[0] = {str(ROOT / 'scripts')!r}; import checkout, specdec, subprocess; "
        f"print(specdec.__file__, flush=True); subprocess.run([sys.executable, '-P', '-c', {child!r}])"
    )
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if Path(path).resolve() != ROOT]
    how = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": os.pathsep.join(others)}}
    done = subprocess.run([sys.executable, "-c", code], **how, capture_output=True, text=True, check=False)
    assert done.stdout.split() == [str(ROOT / "specdec" / "__init__.py")] * 2, done.stderr


@pytest.mark.parametrize(
    ("arguments", "module", "command"),
    [
        (["specdec sweep", "topk=[1,4]"], "specdec.__main__", "specdec sweep 'topk=[1,4]'"),
        (["/anywhere/kernels.py", "--nodes", "9"], "specdec.lab.kernels", "python -m specdec.lab.kernels --nodes 9"),
        (["scripts/gpu_proof.py", "--tiny"], None, "python scripts/gpu_proof.py --tiny"),
    ],
)
def test_results_name_the_command_as_one_types_it(monkeypatch, arguments, module, command):
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", module and SimpleNamespace(name=module), raising=False)
    assert command_line() == command


def test_a_site_without_its_builder_is_refused_before_pages_are_written(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: pytest.fail("pages were removed"))
    with pytest.raises(SystemExit, match="run `make docs`"):
        runpy.run_path(str(ROOT / "scripts" / "build_docs.py"), run_name="__main__")


@pytest.mark.parametrize("book", [{"text": "Short. Text."}, {"text": 5}, {"title": "x"}])
def test_prompts_need_a_book(book, tmp_path):
    for name, row in (("books", book), ("conversations", {"title": "x"})):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    given = {name: tmp_path / f"{name}.jsonl" for name in ("books", "conversations")} | {
        "bench": tmp_path,
        "out": tmp_path,
    }
    words = [word for name, path in given.items() for word in (f"--{name}", str(path))]
    assert "holds no book" in refused(smollm2_prompts.main, *words)


# vLLM

ARGS = Namespace(max_new_tokens=12, steps=3)
PROMPTS = [[1, 300, 400, 500], [1, 700, 30, 20]]


def test_bundled_drafters_and_variants_are_exported(tmp_path):
    for name in ("eagle2", "eagle3"):  # a run's drafter is in RUN/draft
        shutil.copytree(DEMO_TARGET.parent / name, tmp_path / name / "draft")
    runs = [str(tmp_path / name / "draft") for name in ("eagle2", "eagle3")]
    cases, refused = check_in_vllm.drafter_cases(tmp_path, [*sorted(bundled_drafts(None)), *runs])
    assert [case.name for case in cases] == ["demo/eagle2", "demo/eagle3", *runs]
    assert len({case.exported for case in cases}) == 4
    assert set(refused) == {"demo/mtp"}
    variants = check_in_vllm.variant_cases(tmp_path / "variants")
    assert [case.asked["method"] for case in variants] == ["eagle3"] * 8


def test_differences_are_noticed(monkeypatch, tmp_path):
    target, path = load_target(DEMO_TARGET, dtype="fp32"), DEMO_TARGET.parent / "eagle2"
    case, drafters = check_in_vllm.exported("eagle2", path, tmp_path / "eagle2"), (None, load_drafter(path, target))
    right = [check_in_vllm.here(target, d, PROMPTS, 3 if d else 0, ARGS.max_new_tokens) for d in drafters]
    for change, noticed in (
        (lambda rows: None, []),
        (lambda rows: rows[1][1].update(accepted=99), ["prompt 2: other accepted"]),
        (lambda rows: rows[1][0]["tokens"].append(7), ["prompt 1: other tokens"]),
        (lambda rows: rows.pop(), ["vLLM gave no answer"]),
    ):
        rows, folder = copy.deepcopy(right), tmp_path / str(len(list(tmp_path.iterdir())))
        change(rows)
        folder.mkdir()

        def vllm(python, script, flag, jobs, answers, rows=rows):
            assert [job["speculative"] is None for job in json.loads(Path(jobs).read_text())] == [True, False]
            for number, answer in enumerate(rows):
                (answers / f"{number}.json").write_text(json.dumps({"versions": {}, "rows": answer}))

        monkeypatch.setattr(check_in_vllm, "run", vllm)
        report = check_in_vllm.check([case], Path("python"), target, PROMPTS, folder, ARGS)
        again = [f"the export read back: {what}" for what in noticed if "prompt" in what]
        assert report["wrong"] == [f"eagle2: {what}" for what in (*noticed, *again)]
        if len(rows) == 2:
            assert report["results"][0]["texts_equal"] == 2 - any("tokens" in what for what in noticed)


def test_counts_of_one_prompt():
    def metric(name, value):
        return SimpleNamespace(name=f"vllm:spec_decode_{name}", value=value, values=value)

    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")
    before, now = (
        check_in_vllm.counts(SimpleNamespace(get_metrics=lambda values=values: list(map(metric, names, values))))
        for values in ((2, 6, 3, [2, 1, 0]), (5, 15, 7, [4, 2, 1]))
    )
    assert check_in_vllm.difference(now, before) == {
        "drafts": 3, "drafted": 9, "accepted": 4, "by_position": [2, 1, 1]
    }  # fmt: skip
    assert check_in_vllm.counts(SimpleNamespace(get_metrics=list))["by_position"] == []


def test_needs_of_a_package_without_torch():
    needs = ["torch==2.13.0", "pillow", "x; extra == 'y'"]
    assert check_in_vllm.requirements("".join(f"Requires-Dist: {need}\n" for need in needs)) == ["pillow"]


# Stages of the GPU proof


def options(folder: Path, **changes) -> Namespace:
    given = {"device": "cpu", "tiny": True, "work": folder, "out": folder, "conversations": None, "minutes": 1.0}
    return Namespace(**given | changes)


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
