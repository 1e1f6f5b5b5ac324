"""Many generations in one process: this project stays what it was, and a process that does not is found out."""

import json
import sys
from functools import partial
from types import SimpleNamespace

import pytest
from helpers import tiny_drafter, tiny_target

from scripts.drift_check import arguments, draw_case, main, make_engine
from specdec.api import load_target
from specdec.engine.engine import Engine
from specdec.lab.bench.drift import DriftCase, MemoryGrowth, MemoryMark, decode_all, different
from specdec.lab.cost.memory import resident_bytes
from specdec.trees import DynamicTree

CASES = [DriftCase.draw(0, number, vocab=17, longest_prompt=12, most_new=8) for number in range(80)]


def make(speculative: bool) -> Engine:
    target = tiny_target()
    return Engine(target, tiny_drafter(target), DynamicTree(3, 3, 9)) if speculative else Engine(target)


def test_cases_are_of_all_kinds_and_repeatable():
    assert [DriftCase.draw(0, number, 17, 12, 8) for number in range(80)] == CASES
    assert {len(c.prompts) for c in CASES} == {1, 2, 3}
    assert len({(c.sampling.greedy, c.speculative) for c in CASES}) == 4
    assert {c.max_new_tokens for c in CASES} == set(range(1, 9))


def test_memory_is_flat_and_outputs_are_those_of_new_engines():
    decode_all(make, CASES, 80, resident_bytes)  # in a process that decodes first here, oneDNN prepares for each shape
    digests, marks = decode_all(make, CASES, 20, resident_bytes)
    growth = MemoryGrowth.of(marks)
    assert [mark.generations for mark in marks] == [20, 40, 60, 80]
    assert growth.objects < 60
    assert growth.bytes < 8 * 2**20
    assert different(make, CASES[::8], digests[::8]) == []


class Fake:
    """An engine that keeps something of every generation, and lets it show from the 30th on."""

    def __init__(self, kept: list):
        self.kept = kept

    def generate(self, prompts, **how):
        self.kept.append([object() for _ in range(100)])
        self.kept.append({"a": [len(self.kept)]})
        return SimpleNamespace(rows=[SimpleNamespace(tokens=[len(self.kept) > 60])])


def test_a_leak_and_a_drift_are_found():
    kept: list = []
    digests, marks = decode_all(lambda speculative: Fake(kept), CASES, 20, lambda: len(kept))
    growth = MemoryGrowth.of(marks)
    assert growth.objects >= 2 * 60
    assert growth.bytes == 2 * 60
    assert different(lambda speculative: Fake([]), CASES, digests) == list(range(30, 80))


def test_growth_needs_two_marks():
    with pytest.raises(ValueError, match="two marks"):
        MemoryGrowth.of([MemoryMark(50, 1, 1)])


def test_the_command(monkeypatch, tmp_path, capsys):
    out = tmp_path / "drift.json"
    words = ["--generations", "6", "--every", "3", "--fresh", "2", "--new-tokens", "4", "--prompt-tokens", "9"]
    monkeypatch.setattr(sys, "argv", ["drift_check.py", *words, "--allow-objects", "2000", "--out", str(out)])
    args = arguments()
    target = load_target(args.target, tokenizer=False)
    cases = [draw_case(args, target, number) for number in range(6)]
    decode_all(partial(make_engine, target, args.draft), cases, 6, resident_bytes)  # three generations warm nothing up
    main()
    result = json.loads(out.read_text())
    assert result["ok"]
    assert result["equal_to_a_new_engine"] == 6
    assert result["equal_to_a_fresh_process"] == "2 of 2"
    assert len(result["marks"]) == 2
    assert json.loads(capsys.readouterr().out.strip().splitlines()[-1])["ok"]


@pytest.mark.parametrize("words", [["--generations", "60"], ["--every", "0"], ["--fresh", "-1"], ["--fresh", "2000"]])
def test_mistakes_are_one_sentence(monkeypatch, capsys, words):
    monkeypatch.setattr(sys, "argv", ["drift_check.py", *words])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {words[0]} must")
