"""Costs: known functions are found again, real rounds are timed, measurements are cached."""

import statistics
from functools import partial

import numpy as np
import pytest
import torch
from helpers import tiny_drafter, tiny_target

from specdec import own
from specdec.api import make_tree
from specdec.cli.files import CachedJson
from specdec.drafters.vocab import DraftVocab
from specdec.engine.engine import Engine
from specdec.trees import Chain
from specdec.trees.spec import parse_tree
from specdec.tuning import engines, grid
from specdec.tuning.costs import PLAIN, Costs, Kind, Point, identity
from specdec.tuning.grid import grid_costs, measure_grid, probes, useful_trees
from specdec.tuning.timing import SETTLE, in_turns, time_rounds
from specdec.verify import TypicalAcceptance, sample_and_match

FEW = {"topks": (1, 2), "steps": 3, "nodes": (3, 4, 8), "contexts": (8, 24), "repeats": 1}


def known(kind: Kind, context: float, rows: float = 1) -> tuple[float, float]:
    """Seconds of both parts in the form that the module states; v(N) bends at 8."""
    deeper, n = kind.levels - 1, kind.nodes
    draft = 0.7 + 0.3 * deeper + 0.1 * kind.expanded + 1e-4 * context * deeper + 0.01 * n * kind.dynamic
    verify = 2.0 + 0.02 * n + 0.3 * max(n - 8, 0) + (1e-3 + 1e-5 * n) * context
    return rows * (draft if kind.levels else 0.05), rows * verify


def known_points(batches=(1,)) -> list[Point]:
    kinds = [PLAIN, *(Kind.of(tree) for tree in probes((1, 2, 4), 6, (2, 4, 8, 16, 32)))]
    return [Point(k, b, c, *known(k, c, b)) for k in kinds for c in (32, 128, 384) for b in batches]


def test_known_functions_are_found_again():
    costs = Costs(known_points())
    assert max(costs.errors()) < 1e-6
    for tree in useful_trees((1, 2, 3, 4), 6, (2, 4, 8, 12, 16, 24, 32)):  # most were not measured; 12 and 24 never
        kind = Kind.of(tree)
        assert costs.parts(kind, 1, 200.0) == pytest.approx(known(kind, 200.0), rel=1e-6), tree
    assert costs.seconds(PLAIN, 1, np.array([10, 500])) == pytest.approx([sum(known(PLAIN, c)) for c in (10, 500)])
    assert costs.seconds(Kind(2, 4, 2, True), 1, np.array([10, 20, 30])).shape == (3,)


def test_noise_makes_no_time_negative():
    """Rounds that were disturbed at short contexts do not make long contexts free."""
    points = [p for p in known_points() if p.context == 128]
    disturbed = [p._replace(context=32, draft=3 * p.draft, verify=3 * p.verify) for p in points]
    costs = Costs([*points, *disturbed])
    for tree in useful_trees((1, 2, 4), 6, (2, 4, 8, 16, 32)):
        kind = Kind.of(tree)
        assert 0 < costs.seconds(kind, 1, 100.0) <= costs.seconds(kind, 1, 100_000.0)


def test_between_numbers_of_rows_it_is_linear():
    costs, kind = Costs(known_points(batches=(1, 4))), Kind(3, 8, 4, True)
    for rows in (1, 2, 3, 4, 7):
        assert costs.parts(kind, rows, 50.0) == pytest.approx(known(kind, 50.0, rows))
    padded = Costs(known_points(batches=(1, 4)), padded=True)
    assert padded.seconds(kind, 2, 50.0) == pytest.approx(padded.seconds(kind, 4, 50.0))


def test_the_grid_holds_every_tree_that_can_be_made_once():
    trees = useful_trees((1, 2, 4), 4, (2, 3, 4, 8, 16, 32))
    assert len(set(trees)) == len(trees)
    for s in trees:
        tree = make_tree(s.topk, s.steps, s.num_draft_tokens)
        assert (tree.topk, tree.steps, tree.num_draft_tokens) == (s.topk, s.steps, s.num_draft_tokens)
        assert s.num_draft_tokens > s.steps  # no level is drafted in vain
    assert [s for s in trees if s.topk == 1] == [Chain(d) for d in range(1, 5)]
    assert set(probes((1, 2, 4), 4, (2, 3, 4, 8, 16, 32))) <= set(trees)


@pytest.mark.parametrize("room", [200, 60])
def test_every_turn_has_its_rounds_in_texts_that_have_room(pair, room):
    """All rows decode in every timed round, and the engine is free afterwards."""
    engine, turns, rows = Engine(*pair, make_tree(2, 2, 5)), [], []
    engine.reserve(2, room)
    step = engine.step

    def watched():
        report = step()
        rows.append(0 if report is None or report.prefill else sum(map(bool, report.emitted)))
        return report

    engine.step = watched
    found = time_rounds(engine, 2, 4, [lambda i=i: turns.append(i) for i in range(5)], context=20)
    assert turns == [0, 1, 2, 3, 4]
    assert [len(seconds) for seconds in found] == [4] * 5
    assert min(min(seconds) for turn in found for seconds in turn) > 0
    assert rows.count(2) == 5 * (SETTLE + 4)
    assert engine.step() is None


def test_runs_take_turns(capsys):
    order = []
    runs = [lambda i=i: order.append(i) or i for i in range(3)]
    assert in_turns(runs, 2) == [[0, 0], [1, 1], [2, 2]]
    assert order == [0, 1, 2, 2, 1, 0]
    assert in_turns(runs, 1, "turns") == [[0], [1], [2]]
    assert "turns: 100%" in capsys.readouterr().err


def test_measuring_covers_the_probes_and_static_trees(pair, tmp_path):
    file = tmp_path / "tree.yaml"
    file.write_text("paths: [[0], [1], [0, 0], [0, 0, 0], [0, 0, 0, 0]]")
    tree = parse_tree(file)
    assert (tree.steps, tree.num_draft_tokens, str(tree)) == (4, 6, str(file))
    costs = measure_grid(*pair, **FEW, statics=[tree], batches=(1, 2))
    trees = [tree, *probes(FEW["topks"], 3, FEW["nodes"])]
    assert {p.kind for p in costs.points} == {PLAIN, *(Kind.of(t) for t in trees)}
    assert {(p.rows, p.context) for p in costs.points} == {(b, c) for b in (1, 2) for c in (8, 24)}
    every = [Kind.of(t) for t in useful_trees(FEW["topks"], 3, FEW["nodes"])]
    assert all(costs.seconds(kind, 2, 20.0) > 0 for kind in every)
    assert statistics.median(costs.errors()) < 1
    with pytest.raises(ValueError, match="too short to measure"):
        measure_grid(tiny_target(context=12), pair[1], **FEW)


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """Costs are cached in a folder of the test's own, and measuring is counted."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = []

    def fake(target, drafter, **how):
        found.append(how)
        return Costs(known_points())

    monkeypatch.setattr(grid, "measure_grid", fake)
    return found


def test_costs_are_measured_once_and_anew_where_they_may_differ(pair, calls, tmp_path):
    target, drafter = pair
    costs, same = partial(grid_costs, topks=(1, 2)), tiny_target(seed=9)
    assert costs(*pair).points == costs(*pair).points == known_points()
    costs(same, tiny_drafter(same, seed=9))  # the same shapes
    assert len(calls) == len(list(tmp_path.rglob("*.json"))) == 1
    costs(*pair, remeasure=True)
    costs(target, tiny_drafter(target, draft_vocab=8))
    costs(tiny_target(layers=4), drafter)
    costs(*pair, topks=(1, 2, 4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 99)
        costs(*pair)
    file = tmp_path / "tree.yaml"
    for paths in ("[[0], [1]]", "[[0], [1], [0, 0]]"):
        file.write_text(f"paths: {paths}")
        costs(*pair, statics=[parse_tree(file)])
    assert len(calls) == 8


def test_costs_are_those_of_ones_own_code_and_of_the_verifier(pair, tmp_path, monkeypatch):
    (code := tmp_path / "mine.py").write_text("from specdec.drafters.ngram import NGram\n\n\nclass Mine(NGram): ...\n")
    drafter, seen = own.find("drafter", f"{code}:Mine")(DraftVocab(17)), []
    seen.append(identity(pair[0], drafter))
    code.write_text(code.read_text() + "# edited\n")
    seen.append(identity(pair[0], drafter))
    assert seen[0] != seen[1]
    monkeypatch.setattr(engines, "cached_costs", lambda who, *_: seen.append(who))
    for verifier in (sample_and_match, TypicalAcceptance()):
        engines.engine_costs(Engine(*pair, Chain(2), verifier), engines.Workload(1))
    assert seen[2] != seen[3]


def test_what_cannot_be_read_is_measured_anew(pair, calls, tmp_path):
    grid_costs(*pair, topks=(1, 2))
    (file,) = tmp_path.rglob("*.json")
    assert file == CachedJson("tuning", identity(*pair, grid={"topks": (1, 2), "statics": []})).file
    for damaged in ('{"points": [{"tree": 3}]}', '{"points"', "[]"):
        file.write_text(damaged)
        grid_costs(*pair, topks=(1, 2))
    assert len(calls) == 4
    grid_costs(*pair, topks=(1, 2))
    assert len(calls) == 4
