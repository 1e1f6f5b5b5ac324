"""The cost model: known functions are found again, real rounds are timed where they say, measurements are cached."""

import json
import statistics

import numpy as np
import pytest
import torch
from helpers import tiny_drafter, tiny_target

from specdec.api import make_tree
from specdec.cli.files import Kept
from specdec.engine.engine import Engine
from specdec.lab.cost import model as costs
from specdec.lab.cost.model import CostModel, identity, measured_costs
from specdec.lab.cost.rounds import PARTS, RoundCost, measure_rounds, probes, time_rounds, useful_trees
from specdec.structs import Sampling
from specdec.trees import Chain, DynamicTree, StaticTree, Tree
from specdec.trees.spec import parse_tree

FEW = {"topks": (1, 2), "steps": 3, "nodes": (3, 4, 8), "contexts": (8, 24), "repeats": 1}
TEXT = [3, 5, 7, 9, 11]


@pytest.fixture(scope="module")
def pair():
    target = tiny_target()
    return target, tiny_drafter(target)


def known(tree: Tree | None, context: float, batch: float = 1) -> dict[str, float]:
    """Seconds by part in the form that the module states; f(N) bends at 8."""
    if tree is None:
        return {"verify": batch * (2.0 + 1e-3 * context), "host": 0.05}
    w, d, n = tree.topk, tree.steps, tree.num_draft_tokens
    parts = {
        "grow": 0.1 * w + 0.3 * w * (d - 1) + 0.01 * n * (w > 1) + 1e-4 * context * (d - 1),
        "verify": 2.0 + 0.02 * n + 0.3 * max(n - 8, 0) + 0.01 * d + (1e-3 + 1e-5 * n) * context,
        "commit": 0.05 + 0.01 * d,
        "extend": 0.5 + 0.02 * d + 1e-4 * context,
        "host": 0.1,
    }
    return {part: batch * seconds for part, seconds in parts.items()}


def known_points(batches=(1,)) -> list[RoundCost]:
    trees = [None, *probes((1, 2, 4), 6, (2, 4, 8, 16, 32))]
    return [RoundCost(t, c, b, known(t, c, b)) for t in trees for c in (32, 128, 384) for b in batches]


def test_known_functions_are_found_again():
    model = CostModel(known_points())
    assert max(model.errors()) < 1e-6
    for tree in useful_trees((1, 2, 4), 6, (2, 4, 8, 12, 16, 24, 32)):  # most were not measured; 12 and 24 never
        for part, seconds in model.parts(tree, 200.0).items():
            assert seconds == pytest.approx(known(tree, 200.0)[part], rel=1e-6), (tree, part)
    assert model.plain(np.array([10, 500])) == pytest.approx([2.06, 2.55])
    assert model.round(DynamicTree(2, 2, 4), np.array([10, 20, 30])).shape == (3,)


def test_noise_makes_no_time_negative():
    """Rounds that were disturbed at short contexts do not make long contexts free."""
    points = [p for p in known_points() if p.context == 128]
    disturbed = [RoundCost(p.tree, 32, 1, {part: 3 * s for part, s in p.seconds.items()}) for p in points]
    model = CostModel([*points, *disturbed])
    for tree in useful_trees((1, 2, 4), 6, (2, 4, 8, 16, 32)):
        assert 0 < model.round(tree, 100.0) <= model.round(tree, 100_000.0)


def test_between_widths_and_batch_sizes_it_is_linear():
    model, tree = CostModel(known_points(batches=(1, 4))), DynamicTree(3, 3, 8)
    two, three, four = (model.parts(DynamicTree(w, 3, 8), 50.0)["grow"] for w in (2, 3, 4))
    assert three == pytest.approx((two + four) / 2)
    assert model.round(DynamicTree(2, 3, 8), 50.0, 2) == pytest.approx(
        2 * sum(known(DynamicTree(2, 3, 8), 50.0).values())
    )
    assert model.plain(50.0, 3) == pytest.approx(3 * (2.05) + 0.05)
    assert model.parts(tree, 50.0)["verify"] == pytest.approx(known(tree, 50.0)["verify"])


@pytest.mark.parametrize(
    ("tree", "batch", "message"),
    [
        (DynamicTree(8, 2, 8), 1, "topk 8 lies outside what was measured, 1 to 4"),
        (DynamicTree(4, 6, 64), 1, "num_draft_tokens 64 lies outside"),
        (DynamicTree(2, 2, 4), 2, "batch size 2 lies outside what was measured, 1 to 1"),
        (StaticTree([[0], [1]]), 1, "were not measured"),
    ],
)
def test_nothing_is_told_beyond_what_was_measured(tree, batch, message):
    with pytest.raises(ValueError, match=message):
        CostModel(known_points()).round(tree, 50.0, batch)


def test_the_grid_holds_every_tree_that_can_be_made_once():
    trees = useful_trees((1, 2, 4), 4, (2, 3, 4, 8, 16, 32))
    assert len(set(trees)) == len(trees)
    for s in trees:
        tree = make_tree(s.topk, s.steps, s.num_draft_tokens)
        assert (tree.topk, tree.steps, tree.num_draft_tokens) == (s.topk, s.steps, s.num_draft_tokens)
        assert s.num_draft_tokens > s.steps  # no level is drafted in vain
    assert [s for s in trees if s.topk == 1] == [Chain(d) for d in range(1, 5)]
    assert set(probes((1, 2, 4), 4, (2, 3, 4, 8, 16, 32))) <= set(trees)


def test_rounds_are_timed_where_they_say(pair):
    """Contexts are what each round of the same decoding found, and the parts those of the engine."""
    target, drafter = pair
    prompts = [[3, 5, 7, 9], [4] * 9]
    engine = Engine(target, drafter, make_tree(2, 2, 5))
    found = time_rounds(engine, prompts, 12, Sampling())
    rows = engine.generate(prompts, max_new_tokens=12, eos=frozenset()).rows
    rounds = max(row.trace.rounds for row in rows)
    expected = [max(len(row.prompt) + sum(row.trace.emitted[:r]) for row in rows) for r in range(rounds)]
    assert [context for context, _ in found] == expected[1:]
    assert all(tuple(parts) == PARTS and min(parts.values()) > 0 for _, parts in found)
    plain = time_rounds(Engine(target), [[3, 5]], 5, Sampling())
    assert [(context, *parts) for context, parts in plain] == [(c, "verify", "host") for c in (3, 4, 5)]


def test_measuring_covers_the_probes_and_static_trees(pair, tmp_path):
    file, shown = tmp_path / "tree.yaml", []
    file.write_text("paths: [[0], [1], [0, 0], [0, 0, 0], [0, 0, 0, 0]]")
    tree = parse_tree(file)
    assert (tree.steps, tree.num_draft_tokens, str(tree)) == (4, 6, str(file))
    points = measure_rounds(*pair, TEXT, **FEW, statics=[tree], batches=(1, 2), progress=lambda *at: shown.append(at))
    assert {p.tree for p in points} == {None, tree, *probes(FEW["topks"], 3, FEW["nodes"])}
    assert {p.batch for p in points} == {1, 2}
    assert min(p.context for p in points) < 24 < max(p.context for p in points)
    assert [done for done, _ in shown] == list(range(1, shown[-1][1] + 1))
    model = CostModel(points)
    assert all(model.round(t, 20.0, 2) > 0 for t in useful_trees(FEW["topks"], 3, FEW["nodes"]))
    assert statistics.median(model.errors()) < 1
    own = [p for p in points if p.tree == tree and p.batch == 1]
    seconds = [p.seconds["grow"] for p in own]
    assert len(own) == 2  # at every context
    for p in own:
        assert 0.999 * min(seconds) <= model.parts(tree, p.context)["grow"] <= 1.001 * max(seconds)
    before = identity(*pair, statics=[tree])
    file.write_text("paths: [[0], [1], [0, 0]]")
    assert identity(*pair, statics=[parse_tree(file)]) != before
    with pytest.raises(ValueError, match="too short to measure"):
        measure_rounds(tiny_target(context=12), pair[1], TEXT, **FEW)


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """Costs are cached in a folder of the test's own, and measuring is counted."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = []

    def fake(target, drafter, text, **how):
        found.append(how)
        return known_points()

    monkeypatch.setattr(costs, "measure_rounds", fake)
    return found


def test_costs_are_measured_once_and_anew_where_they_may_differ(pair, calls, tmp_path, monkeypatch):
    target, drafter = pair
    first = measured_costs(*pair, TEXT, topks=(1, 2))
    again = measured_costs(*pair, [1, 2, 3], topks=(1, 2))  # another text takes as long
    assert again.points == first.points == known_points()
    measured_costs(tiny_target(seed=9), tiny_drafter(target, seed=9), TEXT, topks=(1, 2))  # the same shapes
    assert len(calls) == len(list(tmp_path.rglob("*.json"))) == 1
    measured_costs(*pair, TEXT, topks=(1, 2), remeasure=True)
    measured_costs(target, tiny_drafter(target, draft_vocab=8), TEXT, topks=(1, 2))
    measured_costs(tiny_target(layers=4), drafter, TEXT, topks=(1, 2))
    measured_costs(target, drafter, TEXT, topks=(1, 2, 4))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        measured_costs(target, drafter, TEXT, topks=(1, 2))
    finally:
        torch.set_num_threads(threads)
    assert len(calls) == 6


def test_what_cannot_be_read_is_measured_anew(pair, calls):
    file = Kept("costs", identity(*pair, topks=(1, 2))).file
    file.parent.mkdir(parents=True)
    for damaged in ('{"points": [{"tree": 3}]}', '{"points"', "[]"):
        file.write_text(damaged)
        measured_costs(*pair, TEXT, topks=(1, 2))
    assert len(calls) == 3
    measured_costs(*pair, TEXT, topks=(1, 2))
    assert len(calls) == 3
    edited = json.loads(file.read_text())
    edited["points"][0]["seconds"] = {"verify": "x"}
    file.write_text(json.dumps(edited))
    measured_costs(*pair, TEXT, topks=(1, 2))
    assert len(calls) == 4
