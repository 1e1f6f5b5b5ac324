"""Sweeps: what a point depends on, interruptions at any place, and mistakes. Block drafters in sweeps, in trees along
paths and in generate."""

import itertools
import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers import main_of, run_here
from sweeps import BENCHMARK, BEST, QUESTIONS, tiny_sweep

from specdec.cli import revision
from specdec.drafters import dflash
from specdec.drafters.formats import save_drafter
from specdec.engine.trace_files import read_trace
from specdec.lab.sweep import store, sweep
from specdec.lab.sweep.benchmarks import Benchmark
from specdec.lab.sweep.points import LAB, NOT_CODE, Draft, code_version, signature
from specdec.lab.sweep.report import write_report
from specdec.lab.sweep.store import RESULTS, TIMINGS, collect, groups, tree_name, write_results
from specdec.lab.sweep.sweep_command import share_of
from specdec.lab.traces.metrics import METRICS
from specdec.structs import Sampling
from specdec.trees.spec import grid
from specdec.verify import make_verifier

sweep_main = main_of("sweep")

SHAPES = ["1/2/3", "2/2/4", "2/2/60"]  # the last cannot be


def points_of(found, drafter_path):
    drafts = [Draft.read(str(drafter_path)), Draft.read("ngram")]
    return found.points(drafts, SHAPES, baseline=True, best_tree=BEST)


def measure(target, drafter_path, out, **how) -> list[str]:
    found = tiny_sweep(target, out, **how)
    lines = [what for _, what in found.run(points_of(found, drafter_path))]
    write_results(out)
    return lines


@pytest.fixture(scope="module")
def whole(target, drafter_path, tmp_path_factory):
    """A sweep that nothing interrupted."""
    out = tmp_path_factory.mktemp("sweep") / "whole"
    lines = measure(target, drafter_path, out)
    assert [what.split(":")[0] for what in lines] == ["measured", *["measured", "measured", "skipped", "measured"] * 2]
    return out


# What a point is


def test_the_key_covers_all_that_matters(target, drafter_path, tmp_path, monkeypatch):
    def keys(**how):
        found = tiny_sweep(target, tmp_path / "x", **how)
        return [point.key for point in points_of(found, drafter_path)]

    first = keys()
    assert len(set(first)) == len(first) == 9
    assert keys() == first
    for how in (
        {"max_new_tokens": 9}, {"sampling": Sampling(0.5)}, {"seed": 1}, {"batch_size": 2}, {"resamples": 21},
        {"benchmark": Benchmark("tiny", BENCHMARK.questions[:2])},
    ):  # fmt: skip
        assert not set(keys(**how)) & set(first), how
    assert keys(benchmark=Benchmark("another name", BENCHMARK.questions)) == first
    changed = keys(verifier=make_verifier("typical"))
    assert [a == b for a, b in zip(changed, first, strict=True)] == [True] + [False, False, False, True] * 2
    monkeypatch.setattr(sweep, "code_version", lambda: "other")
    assert not set(keys()) & set(first)


def test_a_signature_is_of_what_the_files_hold(drafter_path, tmp_path):
    copy = tmp_path / "elsewhere"
    shutil.copytree(drafter_path, copy)
    assert signature(copy) == signature(drafter_path)
    (copy / "README.md").write_text("words")
    assert signature(copy) == signature(drafter_path)
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert signature(copy) != signature(drafter_path)


def test_the_code_version_is_of_what_measures(monkeypatch):
    before, root = code_version(), revision.ROOT
    for name in (*NOT_CODE, *LAB):
        assert [*root.glob(f"{name}*")], "specdec/lab/sweep/points.py names lost files"
    real = Path.read_bytes
    for name, matters in {
        "specdec/engine/engine.py": True,
        "specdec/lab/traces/metrics.py": True,
        "specdec/drafters/eagle3.py": True,
        "specdec/trees/dynamic.py": True,
        "specdec/cli/generate.py": False,
        "specdec/lab/sweep/report.py": False,
        "specdec/lab/sweep/store.py": False,
    }.items():
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_bytes", lambda self, name=name: real(self) + b"#" * (self == root / name))
            assert (code_version() != before) == matters, name


# What is measured


def test_results_are_the_metrics_of_their_traces_and_what_cannot_be_is_named(whole):
    results, timings, old = collect(whole)
    assert (old, len(results), len(groups(results))) == (0, 9, 1)
    decoded = [r for r in results if r["kind"] == "decode" and "skipped" not in r]
    assert len(decoded) == 5
    for r in decoded:
        trace = read_trace(whole / "points" / r["key"] / "trace")
        assert r["metrics"]["tau"]["value"] == METRICS["tau"](trace.rows)
        assert r["rows"] == r["identical"] == 4
        assert {row.category for row in trace.rows} == {"animals", "numbers"} == set(r["by_category"])
        assert timings[r["key"]]["tokens_per_second"] > 0
    assert decoded[0]["names"]["draft"] == "none"
    skipped = [r["skipped"] for r in results if "skipped" in r]
    assert len(skipped) == 2
    assert all("num_draft_tokens is 60, but with topk 2 and steps 2" in why for why in skipped)


def test_nothing_is_measured_twice_and_points_of_other_code_are_left_out(whole, target, drafter_path, monkeypatch):
    monkeypatch.setattr(Draft, "load", None)
    before = (whole / TIMINGS).read_bytes()
    assert measure(target, drafter_path, whole) == ["reused"] * 9
    assert (whole / TIMINGS).read_bytes() == before
    monkeypatch.setattr(store, "code_version", lambda: "other")
    assert collect(whole) == ([], {}, 9)


def test_trees_by_name_by_file_and_of_own_code(target, tmp_path):
    """They are known by what they hold, and own ones by their code."""
    mine, file = tmp_path / "my.py", tmp_path / "tree.yaml"
    file.write_text("paths: [[0], [1], [0, 0]]")
    code = """
from specdec.trees import DynamicTree, StaticTree
class Mine(DynamicTree):
    def __init__(self):
        super().__init__(2, 2, 4)
def small():
    return StaticTree([[0]])
"""
    mine.write_text(code)
    trees = [f"{mine}:Mine", f"{mine}:small", str(file), "paths 0 1 0.0", "chain", "1/5/6", "2/2/4"]
    found = tiny_sweep(target, tmp_path / "sweep", max_new_tokens=4, probe=0)
    points = found.points([Draft.read("ngram")], trees, True, None)
    list(found.run(points))
    results, timings, _ = write_results(tmp_path / "sweep")
    names = [tree_name(r) for r in results[1:]]
    assert sorted(names) == sorted(["chain 5", "2/2/4", f"{mine}:small", f"{mine}:Mine", str(file)])
    assert all(r["identical"] == r["rows"] for r in results)
    assert write_report(tmp_path / "sweep", results, timings, "command").is_file()
    mine.write_text(code + "# changed")
    later = found.points([Draft.read("ngram")], trees, True, None)
    assert [a.tree for a, b in zip(later, points, strict=True) if a.key != b.key] == [f"{mine}:Mine"]
    with pytest.raises(ValueError, match="there is no tree 'ring'"):
        found.points([Draft.read("ngram")], ["ring"], False, None)


def test_points_of_one_name_are_distinguished(target, tmp_path):
    """Another drafter of the same name, and then another verifier, in the folder of an earlier sweep."""
    for draft, rule in (("ngram", "match"), ("ngram:suffix", "match"), ("ngram:suffix", "typical")):
        found = tiny_sweep(target, tmp_path, verifier=make_verifier(rule))
        list(found.run(found.points([Draft.read({"draft": draft, "name": "mine"})], ["1/2/3"], False, None)))
    names = [r["names"]["draft"] for r in collect(tmp_path)[0]]
    match, typical = (f", verifier {make_verifier(rule)}" for rule in ("match", "typical"))
    drafters = [
        f"mine, weights ngram{match}",
        f"mine, weights ngram:suffix{match}",
        f"mine, weights ngram:suffix{typical}",
    ]
    assert sorted(names) == sorted(drafters)


# Interruptions


class Killed(BaseException):
    """Ends the process as a signal would: nothing of ours catches it."""


PLACES = {
    "while plain decoding": (sweep, "converse", 1),
    "while a drafter is measured": (sweep, "converse", 6),
    "while metrics are computed": (sweep, "summary", 3),
    "while a trace is written": (store, "write_trace", 2),
    "before a point is put in place": (Path, "rename", 5),
    "while a best tree is measured": (sweep, "record", 1),
    "while results are put together": (store, "write_text", 2),
}


@pytest.mark.matrix
@pytest.mark.parametrize("place", PLACES)
def test_killed_and_resumed_is_the_same(place, whole, target, drafter_path, tmp_path):
    owner, attribute, calls = PLACES[place]
    real, count = getattr(owner, attribute), itertools.count(1)

    def killed(*args, **kwargs):
        if next(count) == calls:
            raise Killed
        return real(*args, **kwargs)

    with mock.patch.object(owner, attribute, killed), pytest.raises(Killed):
        measure(target, drafter_path, tmp_path)
    points = tmp_path / "points"
    done = len(list(points.glob(f"*/{store.RESULT}")))
    lines = measure(target, drafter_path, tmp_path)
    assert lines.count("reused") == done - len([*points.glob("*.partial")])
    assert (tmp_path / RESULTS).read_bytes() == (whole / RESULTS).read_bytes()
    assert [p.name for p in points.iterdir() if p.suffix] == []


def test_jobs_that_share_a_sweep_make_the_same_file(whole, target, drafter_path, tmp_path):
    found = tiny_sweep(target, tmp_path / "shared")
    points = points_of(found, drafter_path)
    shares = [share_of(points, shard, 2, rank, 2) for shard in (0, 1) for rank in (0, 1)]
    assert sorted(p.key for share in shares for p in share) == sorted(p.key for p in points)
    for share in reversed(shares):
        list(tiny_sweep(target, tmp_path / "shared").run(share))
        write_results(tmp_path / "shared")
    assert (tmp_path / "shared" / RESULTS).read_bytes() == (whole / RESULTS).read_bytes()


def test_answers_of_one_token_make_no_best_tree(target, drafter_path, tmp_path):
    found = tiny_sweep(target, tmp_path / "short", max_new_tokens=1)
    points = [point for point in points_of(found, drafter_path) if point.kind == "best_tree"]
    with pytest.raises(ValueError, match="every answer that the best tree is measured along, of 2, is one token long"):
        list(found.run(points))


# The command


def test_the_command(target_path, drafter_path, tmp_path):
    out, questions = tmp_path / "out", tmp_path / "questions.jsonl"
    records = [{"question_id": q.id, "category": q.category, "turns": q.turns} for q in BENCHMARK.questions]
    questions.write_text("".join(json.dumps(r) + "\n" for r in records))
    settings = (
        f"benchmark.path={questions}", f"target.path={target_path}", f"draft={drafter_path}", f"out={out}",
        "topk=[1,2]", "steps=2", "num_draft_tokens=[4,60]", "max_new_tokens=8", "resamples=20", "best_tree.questions=2",
    )  # fmt: skip
    first = run_here(sweep_main, *settings)
    assert first.returncode == 0
    last = json.loads(first.stdout.splitlines()[-1])
    assert last == {
        "out": str(out), "points": 3, "best_trees": 1, "to_be_measured_elsewhere": 0, "measured": 4, "reused": 0,
        "skipped": 1,
    }  # fmt: skip
    assert "drafter 2/2/60 skipped: num_draft_tokens is 60" in first.stderr
    results = (out / RESULTS).read_bytes()
    assert (out / "report.html").is_file()
    assert json.loads(run_here(sweep_main, *settings, "report=false").stdout.splitlines()[-1])["reused"] == 5
    assert (out / RESULTS).read_bytes() == results


# Block drafters


generate = main_of("generate")

KINDS = {
    "dflash": {"block_size": 5},
    "dspark": {"block_size": 4, "label": "p+k+1", "conditional": "markov", "rank": 4, "confidence": True},
}
BLOCK = ["--tree", "block"]  # by default far deeper than this block
TREES = {
    "dflash": [BLOCK, ["--tree", "block 2/3/6"]],
    "dspark": [["--topk", "2", "--steps", "4"], ["--topk", "1", "--steps", "4"]],
}


@pytest.fixture(scope="module")
def folders(target, tmp_path_factory):
    found = {kind: tmp_path_factory.mktemp("blocks") / kind for kind in KINDS}
    for kind, folder in found.items():
        torch.manual_seed(0)
        save_drafter(dflash.create(target, layers=1, taps=2, **KINDS[kind]), folder, target)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_is_measured_and_decoded_with(folders, target_path, tmp_path, capsys, kind):
    models = ["--target", str(target_path), "--draft", str(folders[kind])]
    prompts, out = tmp_path / "prompts.txt", tmp_path / "tree.yaml"
    prompts.write_text("what is a tree?\nwhy?\n")
    how = ["--prompts", str(prompts), "--raw", "--max-new-tokens", "10"]
    main_of("tune tree")([*models, *how, "--topk", "3", "--num-draft-tokens", "6", "--out", str(out)])
    assert "depth 4:" in capsys.readouterr().out
    for tree in [["--tree", str(out)], *TREES[kind]]:
        generate([*models, *how, *tree, "--compare"])
        assert "identical: yes" in capsys.readouterr().out
    if kind == "dspark":
        with pytest.raises(SystemExit):
            generate([*models, *how, *BLOCK])
        assert "take a dynamic tree" in capsys.readouterr().err


def test_a_sweep_has_points_over_blocks(folders, target, tmp_path):
    sweep = tiny_sweep(target, tmp_path, Benchmark("tiny", QUESTIONS[2:]))
    drafts = [Draft.read(str(folder)) for folder in folders.values()]
    trees = grid(2, 3, 6) + grid([1, 2], 3, 6, block=True)
    points = sweep.points(drafts, trees, baseline=True, best_tree=None)
    reported = [what.split(":")[0] for _, what in sweep.run(points)]
    assert reported == ["measured"] * 6 + ["skipped"]  # the last one's slots depend on the drafted tokens
    results, _, _ = write_results(tmp_path)
    assert {r["names"]["draft"] for r in results} >= {"dflash", "dflash, over the block", "dspark"}
    assert [r["identical"] for r in results if "tau" in r.get("metrics", {})] == [1] * 6
