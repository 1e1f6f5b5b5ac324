"""Rows that have ended are dropped from the following rounds; rows, traces and reports do not show it."""

import pytest
from helpers import DRAFTERS, tiny_target
from test_batches import HEAVY, TREES, After, ragged
from test_overlap import assert_same, outcome

from specdec.engine import batch as batches
from specdec.engine.engine import Engine
from specdec.structs import Sampling
from specdec.trees import Chain


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("drafter", [None, "eagle3", "lookup", "draft-model"])
def test_rows_that_have_ended_are_not_computed(drafter, late):
    """All of 16 rows but one end in the second round. The engine knows that one round later, and two if rounds are
    read late."""
    target, computed = tiny_target(), []
    engine = Engine(target, *([DRAFTERS[drafter](target), Chain(1)] if drafter else []), overlap=late)
    target.register_forward_pre_hook(lambda _, args: computed.append(len(args[0])))
    limits = [2] * 16
    limits[5] = 20
    rows = engine.generate([[3, 1]] * 16, max_new_tokens=limits, eos=frozenset()).rows
    assert [len(row.tokens) for row in rows] == limits
    assert computed[1:3] == [16, 16]
    assert set(computed[3:]) == {1}
    assert 0 <= len(computed) - 1 - rows[5].trace.rounds <= late  # a round that was started in vain


@pytest.mark.parametrize("price", [0.0, batches.PRICE], ids=["at once", "by the rule"])
@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize(("drafter", "tree"), [("eagle3", "dynamic"), ("mtp", "sampled"), ("dflash", "chain")])
def test_dropping_rows_shows_nowhere(drafter, tree, late, price, monkeypatch):
    """Text, log-probabilities and reports are those of rows that are carried to the end."""
    monkeypatch.setattr(batches, "PRICE", price)
    target, (prompts, limits) = tiny_target(), ragged(6)
    sampling = [Sampling(0.8, 5, 0.9), HEAVY, Sampling()] * 2
    how = {"max_new_tokens": limits, "sampling": sampling, "eos": frozenset([11]), "logprobs": True}
    results = [
        outcome(
            Engine(target, DRAFTERS[drafter](target), TREES[tree], **made), prompts, **how,
            stop=[After(4 + i) if i % 4 == 2 else None for i in range(6)],
        )
        for made in ({"overlap": late}, {"compact": False})
    ]  # fmt: skip
    assert_same(*results)
    assert {finish for _, finish, _ in results[0][0]} >= {"length", "stop"}
    assert len(results[0][2][-1][0]) < 6, "nothing was dropped: the test shows nothing"
