"""Round costs by tree: the grid, the numbers by hand, the script as a whole on a tiny shape."""

import json
import re
import sys

import pytest

from scripts import round_cost
from specdec.lab.cost.rounds import RoundCost
from specdec.trees.spec import TreeSpec

TINY = ["shape=tiny", "topk=[1,2]", "num_draft_tokens=[3,8]", "steps=3", "context=12", "new_tokens=13"]
TINY += ["repeats=1", "trials=2"]


def script(monkeypatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["round_cost.py", *words])
    round_cost.main()


@pytest.mark.parametrize("topk", [1, 2, 3, 8])
@pytest.mark.parametrize("nodes", [2, 3, 4, 7, 16, 33])
def test_every_tree_of_the_grid_can_be_and_drafts_no_level_in_vain(topk, nodes):
    levels = round_cost.levels(topk, nodes, 4)
    tree = TreeSpec(topk, levels, nodes).build()  # refuses levels that are too few for the nodes
    assert tree.num_draft_tokens == nodes > levels
    assert levels <= 4 or nodes > topk + 3 * topk**2 + 1  # more than asked for only where the nodes need them


def test_rows_by_hand():
    def point(setting, *parts):
        return RoundCost(
            setting, 20.0, 1, dict(zip(("grow", "verify", "commit", "extend", "host"), parts, strict=True))
        )

    plain = RoundCost(None, 20.0, 1, {"verify": 3.5, "host": 0.5})
    small, large = TreeSpec(1, 3, 4), TreeSpec(4, 4, 16)
    points = [point(small, 1, 4, 0.25, 0.5, 0.25), point(large, 2, 8, 0.25, 1.5, 0.25)]
    first, second = round_cost.costs_of(plain, points, tau=3)
    assert (first.draft, first.verify, first.rest, first.seconds) == (1.5, 4, 0.5, 6)
    assert (first.plain_tokens, first.speedup, first.tau_to_equal) == (1.5, 2, 3)
    assert (second.plain_tokens, second.speedup, second.tau_to_equal) == (3, 1, 6)


def test_the_command(monkeypatch, tmp_path, capsys):
    script(monkeypatch, *TINY, "tau=2.5", f"out={tmp_path / 'deep' / 'rc'}")
    table, told = capsys.readouterr().out.rstrip().rsplit("\n", 1)
    told, result = json.loads(told), json.loads((tmp_path / "deep" / "rc" / "round_cost.json").read_text())
    assert (tmp_path / "deep" / "rc" / "round_cost.png").read_bytes().startswith(b"\x89PNG")
    assert told["benchmark"] == result["benchmark"] == "SIMULATED tau 2.5: tiny, random weights, float32, cpu"
    assert "SIMULATED tau 2.5" in table
    assert result["simulated"] is True
    assert result["settings"]["tau"] == 2.5
    assert {"cpu", "threads", "device"} <= set(result["machine"])
    rows = result["rows"]
    assert [(r["topk"], r["num_draft_tokens"], r["steps"]) for r in rows] == [
        (1, 3, 2),
        (1, 8, 7),
        (2, 3, 2),
        (2, 8, 3),
    ]
    for r in rows:
        assert r["round_ms"] == pytest.approx(r["draft_ms"] + r["verify_ms"] + r["rest_ms"])
        assert min(r["draft_ms"], r["verify_ms"], r["rest_ms"]) > 0
        assert r["break_even_tau"] == pytest.approx(r["round_ms"] / result["plain_ms"])
        assert r["speed_to_plain"] == pytest.approx(2.5 / r["break_even_tau"])
    assert result["best"] == min(rows, key=lambda r: r["round_ms"])
    real, best = result["real"], result["best"]
    assert real["setting"] == f"{best['topk']}/{best['steps']}/{best['num_draft_tokens']}"
    assert real["tau"] == 12 / 5  # rounds of 2, 3, 2, 3, 2
    assert real["least_ratio"] <= real["ratio"] <= real["most_ratio"]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("tau=3.5", "a simulated tau of 3.5 needs trees of at least 2.5 levels, this one has 2"),
        ("tau=0.5", "a simulated tau must be at least 1"),
        ("tau=high", "tau must be a number, got 'high'"),
        ("topk=[0]", "topk must be at least 1, got 0"),
        ("num_draft_tokens=8", r"num_draft_tokens takes a list of whole numbers, such as \[1,4\], and not 8"),
        ("num_draft_tokens=[1,8]", "num_draft_tokens must be a whole number of at least 2, got 1"),
        ("repeats=0", "repeats must be at least 1, got 0"),
        ("context=4090", "the context of tiny, random weights holds 4096"),
        ("topk=[99]", "topk is 99, but the draft vocabulary has 50 tokens only"),
        ("~shape", "give shape="),
        ("dtype=fp12", "dtype must be auto, fp32, fp16 or bf16, got 'fp12'"),
        ("nodes=3", "nodes"),
    ],
)
def test_bad_settings_are_one_sentence(monkeypatch, tmp_path, capsys, word, message):
    with pytest.raises(SystemExit) as ended:
        script(monkeypatch, *TINY, f"out={tmp_path}", word)
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert ended.value.code == 2
    assert error.startswith("error: ")
    assert re.search(message, error)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_is_refused_before_anything_is_timed(monkeypatch, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit):
        script(monkeypatch, *TINY, f"out={tmp_path / 'file'}")
    assert "cannot write to" in capsys.readouterr().err
