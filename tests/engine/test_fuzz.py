"""scripts/fuzz.py: a sample of its cases is right, and a planted fault is found and told."""

import json

import fuzz
import pytest
import torch
from helpers import run_here

from specdec.model.cache import KVCache


@pytest.fixture
def run(monkeypatch):
    """run(*flags) -> exit code, lines of standard output."""
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # of the other tests' process

    def call(*flags):
        done = run_here(fuzz.main, *flags)
        return done.returncode, done.stdout.splitlines()

    return call


def test_a_sample_of_cases(run):
    assert run("--cases", "25", "--seconds", "600") == (0, ['{"cases": 25, "wrong": 0}'])


def test_a_fault_is_found_and_its_case_is_told(run, monkeypatch, tmp_path):
    """Accepted nodes are committed as if they were the first ones, as those of a chain are."""
    commit = KVCache.commit
    monkeypatch.setattr(
        KVCache, "commit", lambda cache, path, *rest: commit(cache, torch.arange(path.shape[1]).expand_as(path), *rest)
    )
    code, lines = run("--cases", "25", "--seconds", "600", "--out", str(tmp_path / "found.json"))
    found = json.loads((tmp_path / "found.json").read_text())["found"]
    assert code == 1
    assert json.loads(lines[-1]) == {"cases": 25, "wrong": len(found)}
    first = found[0]["case"]
    assert lines[0] == f"case {first}: {found[0]['about']}"
    assert ", and alone [" in lines[1]
    assert run("--first", str(first), "--cases", "1")[1][:2] == lines[:2]
