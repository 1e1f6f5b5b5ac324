"""Files that were edited by hand are taken, or refused by one sentence: never a traceback."""

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from edits import edited
from helpers import main_of, refused, run_here
from safetensors.torch import load_file, save
from sweeps import BEST, tiny_sweep

from specdec.acceptance import FILE, read_acceptance
from specdec.drafters.formats.maps import read_token_map
from specdec.drafters.vocab import DraftVocab
from specdec.engine.trace_files import HEADER, NODES, ROUNDS, ROWS, read_trace
from specdec.lab.sweep import store
from specdec.lab.sweep.points import Draft
from specdec.lab.sweep.report import write_report
from specdec.lab.sweep.store import collect, print_tables
from specdec.lab.traces import diagnose
from specdec.model.loader import load_target
from specdec.training.features.feature_cache import MANIFEST, SCHEMA, FeatureCache
from specdec.training.loop.log import RunLog, read_log


@pytest.fixture(scope="module")
def swept(target_path, drafter_path, tmp_path_factory):
    """A sweep of plain decoding, a drafter with a tree, one that cannot be, and a best tree."""
    out = tmp_path_factory.mktemp("swept")
    found = tiny_sweep(load_target(target_path), out, resamples=5)
    list(found.run(found.points([Draft.read(str(drafter_path))], ["2/2/4", "2/2/60"], True, BEST)))
    assert len(collect(out)[0]) == 4
    return out


@pytest.fixture(scope="module")
def trace(swept):
    traces = swept.glob("points/*/trace")
    return next(p for p in traces if any(r.tree for row in read_trace(p).rows for r in row.rounds))


def check_metrics(folder: Path) -> str:
    """Print metrics and diagnose; returns the refusal, one sentence, or nothing."""
    if run_here(main_of("trace metrics"), str(folder), "--resamples", "3").returncode:
        return refused(main_of("trace metrics"), folder)
    rows = read_trace(folder).rows
    diagnose.calibration(rows)
    diagnose.by_context(rows, resamples=3)
    diagnose.examples(rows, str)
    said = refusal(diagnose.coverage, rows, SimpleNamespace(vocab=DraftVocab(9, None)), str)
    assert not said or "belongs to another target" in said
    return ""


def put_in_trace(trace: Path, folder: Path, name: str, content: bytes) -> None:
    """Copy a trace with other content of a file and a matching digest, as somebody does who knows the format."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(trace, folder)
    (folder / name).write_bytes(content)
    if name != HEADER:
        header = json.loads((folder / HEADER).read_text())
        header["sha256"][name] = hashlib.sha256(content).hexdigest()
        (folder / HEADER).write_text(json.dumps(header))


@pytest.mark.parametrize("name", [HEADER, ROWS, ROUNDS])
def test_traces(trace, tmp_path, name):
    found = []
    for what, content in edited((trace / name).read_bytes(), 60):
        put_in_trace(trace, tmp_path / "t", name, content)
        found.append(check_metrics(tmp_path / "t"))
        assert not found[-1] or str(tmp_path / "t") in found[-1], what
    assert len(list(filter(None, found))) > len(found) / 3


def test_nodes_of_traces(trace, tmp_path):
    tensors = load_file(trace / NODES)
    edits = {
        "no tensor": lambda t: t.pop("p"),
        "other type": lambda t: t.update(tokens=t["tokens"].double()),
        "shorter": lambda t: t.update(logq=t["logq"][1:]),
        "two axes": lambda t: t.update(logp=t["logp"][:, None]),
        "a parent after its child": lambda t: t["parents"].fill_(7),
        "a negative parent": lambda t: t["parents"].fill_(-1),
        "a negative token": lambda t: t["tokens"].fill_(-5),
    }

    def check(content: bytes) -> str:
        put_in_trace(trace, tmp_path / "t", NODES, content)
        return check_metrics(tmp_path / "t")

    for what, change in edits.items():
        other = {key: tensor.clone() for key, tensor in tensors.items()}
        change(other)
        assert NODES in check(save(other)), what
    for value in (torch.nan, torch.inf, -torch.inf, 1e38):  # numbers of a drafter that says so are no damage
        assert check(save(tensors | {"logq": torch.full_like(tensors["logq"], value)})) == ""
    content = (trace / NODES).read_bytes()
    for bad in (b"", content[:50], content[:-4], b"\xff" * 100):
        assert NODES in check(bad)


@pytest.mark.parametrize("name", [store.RESULT, store.TIMES])
def test_points_of_sweeps(swept, tmp_path, name, capsys):
    out, refusals = tmp_path / "out", 0

    def show() -> None:
        results, timings, _ = collect(out)
        print_tables(results, timings)

    for number, file in enumerate(sorted(swept.glob(f"points/*/{name}"))):
        drawn = 0
        for what, content in edited(file.read_bytes(), 25, seed=number):
            shutil.copytree(swept, out, ignore=shutil.ignore_patterns("trace"))
            (out / file.relative_to(swept)).write_bytes(content)
            said = refusal(show, what=f"{file}: {what}")
            if said:
                assert str(file.relative_to(swept)) in said
                refusals += 1
            elif drawn < 1 and what.startswith("line"):
                assert not refusal(lambda: write_report(out, *collect(out)[:2], "specdec sweep"), what=what)
                drawn += 1
            shutil.rmtree(out)
    assert refusals > 50


def test_acceptance(tmp_path):
    along = {"temperature": 0.0, "topk": 4, "steps": 3, "texts": ["00 1 - 2", "0 - -"]}
    content = {"format": "specdec acceptance 1", "about": "x", "measured": [along, along | {"temperature": 1.0}]}

    def use() -> None:
        assert read_acceptance(tmp_path).tau([(0,), (0, 0)], 0.5) >= 1

    assert refused_edits(tmp_path / FILE, content, use) > 1 / 3


def test_token_maps(tmp_path):
    assert refused_edits(tmp_path / "map.json", [5, 6, 7, 8], lambda: read_token_map(tmp_path / "map.json", 9)) > 1 / 3
    many = torch.zeros(4)
    for wrong in (many, many.to_sparse(), many.cfloat(), many.long() - 1, {"a": 1}, "5", [[5]], None):
        torch.save(wrong, tmp_path / "map.pt")
        assert "map.pt" in refusal(read_token_map, tmp_path / "map.pt", 9, what=str(wrong))


def refused_edits(file: Path, content: object, use: Callable[[], object]) -> float:
    """Edit a JSON file in many ways; `use` reads it. Returns the share of the edits that are refused."""
    found = []
    for what, changed in edited(content if isinstance(content, bytes) else json.dumps(content).encode(), 200):
        file.write_bytes(changed)
        found.append(refusal(use, what=what))
        assert not found[-1] or str(file.parent) in found[-1]
    return sum(map(bool, found)) / len(found)


def refusal(use: Callable, *given: object, what: str = "") -> str:
    """Call `use`; returns the one sentence that refuses, or nothing."""
    try:
        use(*given)
    except ValueError as error:
        said = str(error)
    except Exception as error:
        raise AssertionError(what) from error
    else:
        return ""
    assert said
    assert "\n" not in said
    return said


def test_logs_of_training(tmp_path):
    rows = [{"split": split, "step": step, "tokens": 9, "loss": 2.5, "gradient_norm": 0.1, "accuracy": [0.5, 0.25]}
            for step in range(3) for split in ("train", "heldout")]  # fmt: skip
    file = tmp_path / "log.jsonl"
    valid = "".join(json.dumps(row) + "\n" for row in [*rows, {"split": "decode", "step": 3, "tau": 1.5}]).encode()
    refused_edits(file, valid, lambda: RunLog(tmp_path).forget_after(2))
    file.write_bytes(valid)
    RunLog(tmp_path).forget_after(2)
    assert [row["step"] for row in read_log(file)] == [0, 0, 1, 1, 2, 2]


def test_manifests_of_caches(tmp_path):
    """No shard is there, so that every manifest is refused."""
    content = {"schema": SCHEMA, "keep": 4, "shards": [[0, 3], [3, 5]], "taps": [1], "target": "a (b)"}
    assert refused_edits(tmp_path / MANIFEST, content, lambda: FeatureCache(tmp_path)) == 1


def test_commands_that_read_no_such_files_start_without_pydantic():
    modules = "specdec.cli.generate, specdec.engine.trace_files, specdec.training.train"
    subprocess.run([sys.executable, "-c", f"import sys, {modules}; sys.exit('pydantic' in sys.modules)"], check=True)
