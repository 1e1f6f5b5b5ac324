"""Adaptive policies replayed and under simulated loads."""

import itertools
import json

import numpy as np
import pytest
from helpers import run_here, tiny_drafter, tiny_target

from specdec.adaptive import Curve, Fixed, Policy
from specdec.calibrate import assembled, sizes_of
from specdec.engine.engine import Engine
from specdec.lab.load import loads, simulate_load
from specdec.lab.load.replayed import Bound, Drafts
from specdec.lab.replay import record
from specdec.structs import Sampling
from specdec.trees import DynamicTree

PROMPTS = [[3, 5, 7, 9], [1], [8, 2, 6], [4, 4], [11, 2]]
HOW = {"max_new_tokens": 40, "eos": frozenset({4})}
TREES = {"chain": DynamicTree(1, 3, 4), "tree": DynamicTree(3, 3, 9)}


def curve(node: float, base: float = 1.0, rows=(1, 4, 16)) -> Curve:
    verify = {b: {n: base + node * b * n for n in range(1, 10)} for b in rows}
    return Curve(rows, {b: [0.0, *(0.02 * d for d in range(1, 4))] for b in rows}, verify)


@pytest.fixture(scope="module")
def pair():
    target = tiny_target()
    return target, tiny_drafter(target)


@pytest.fixture(scope="module", params=[None, Sampling(0.8)], ids=["greedy", "drawn"])
def recorded(pair, request):
    how = {"sampling": request.param} if request.param else {}
    return record(*pair, PROMPTS, topks=(1, 3), steps=3, seed=5, **how, **HOW), request.param


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", ["fixed", "table", "ema", "survival:told", "survival:calibrated", "survival:margin"])
def test_a_replayed_policy_accepts_what_the_real_one_does(pair, recorded, name, tree):
    """Round by round, for rows that are decoded together. Texts are short: a fit falls into the run."""
    superset, sampling = recorded
    tree, costs = TREES[tree], curve(0.02)
    drafts = Drafts(superset, tree)
    made = [assembled(name, lambda: costs, sizes_of(tree), [0.5, 0.5, 0.5]) for _ in range(2)]
    for policy in made:
        if hasattr(policy, "estimator"):
            policy.estimator.since, policy.seen, policy.drafts = 200, 60, 3  # a fit, and cuts, within the run
    replayed = drafts.decode(made[0], range(len(PROMPTS)))
    rows = Engine(*pair, tree, adaptive=made[1]).generate(PROMPTS, sampling=sampling, seed=5, **HOW).rows
    assert [row.tokens for row in rows] == drafts.tokens
    assert replayed == [row.trace.accepted for row in rows]
    assert sum(map(sum, replayed)) > 0


def test_no_policy_beats_the_bound(recorded):
    drafts = Drafts(recorded[0], TREES["tree"])
    for node, rows in itertools.product((0.001, 0.05, 0.3), (1, 3)):
        costs = curve(node)
        bound = Bound(drafts, costs, rows)
        makers = {name: lambda name=name, costs=costs: assembled(name, lambda: costs, sizes_of(drafts.tree), [0.5] * 3)
                  for name in ("table", "ema", "survival:told")}  # fmt: skip
        makers |= {f"fixed {k}": lambda k=k: Fixed(k) for k in range(4)}
        for row in loads.compare(drafts, makers, costs, [rows], 12):
            assert 0 <= row["regret"] < 1
        assert bound.least[0][0] == pytest.approx(least_by_search(drafts, costs, rows, 0))


def least_by_search(drafts, costs, rows, text) -> float:
    """The clairvoyant bound of one text, by trying everything from its end."""
    best = {drafts.roots[text]: 0.0}
    for root in reversed(range(drafts.roots[text])):
        found = []
        for levels in range(4):
            at = drafts.starts[text] + root
            deep = int((drafts.right[levels][at] * drafts.drafts[levels].depth[at]).max()) if levels else 0
            for accepted in range(deep + 1):
                then = best[min(root + accepted + 1, drafts.roots[text])]
                found.append(costs.seconds(rows, levels, accepted + 1) / rows + then)
        best[root] = min(found)
    return best[0]


def test_under_arrivals_every_text_is_served(recorded):
    drafts, costs = Drafts(recorded[0], TREES["chain"]), curve(0.01, base=0.01)
    slow = loads.opened(drafts, Fixed(3), costs, 4, loads.arrivals(0.001, 10, 0))
    alone = [sum(costs.seconds(1, 3, 4) for _ in drafts.decode(Fixed(3), [i])[0]) / drafts.roots[i] for i in range(5)]
    assert slow["tpot_ms"]["mean"] == pytest.approx(1e3 * np.mean(alone))
    busy = loads.opened(drafts, Fixed(3), costs, 4, loads.arrivals(1000.0, 10, 0))
    assert busy["ttft_ms"]["mean"] > slow["ttft_ms"]["mean"]
    assert busy["tokens_per_second"] > slow["tokens_per_second"]


def test_the_command(target_path, drafter_path, tmp_path):
    """By measured costs and by formulas, from one recording; both are marked."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\nanother\n")
    words = ["--recording", str(tmp_path / "recording"), "--steps", "2", "--requests", "6", "--concurrency", "1,2"]
    made = ["--prompts", str(prompts), "--max-new-tokens", "12", "--target", str(target_path), "--draft"]
    out, chart = tmp_path / "out.json", tmp_path / "chart.png"
    first = run_here(simulate_load.main, *words, *made, str(drafter_path), "--out", str(out), "--chart", str(chart))
    assert first.returncode == 0, first.stderr
    assert "SIMULATED" in first.stdout
    assert chart.stat().st_size > 1000
    told = json.loads(out.read_text())
    assert not told["costs"]["simulated"]
    assert {row["policy"] for row in told["rows"]} >= {"plain", "fixed 2", "survival:calibrated"}
    second = run_here(simulate_load.main, *words, "--hardware", "h100", "--rate", "5,500")
    assert second.returncode == 0, second.stderr
    assert json.loads(second.stdout.splitlines()[-1]) == {
        "note": simulate_load.SIMULATED, "simulated_costs": True, "loads": 2
    }  # fmt: skip
    assert run_here(simulate_load.main, "--recording", str(tmp_path / "none")).returncode == 2


def test_policies_that_do_not_cut_are_not_shown_drafts(recorded):
    class Blind(Policy):
        def plan(self, rows):
            return 2

        def learn(self, outcome):
            assert outcome.draft is None

    assert Drafts(recorded[0], TREES["chain"]).decode(Blind(), [0, 1])
