"""Rounds with block drafters."""

import numpy as np
import pytest
from helpers import DRAFTERS, tiny_block, tiny_target
from policies import Restless

from specdec.engine.controller import NEVER
from specdec.engine.engine import Engine
from specdec.structs import Sampling
from specdec.trees import BlockTree, Chain, DynamicTree
from specdec.tuning.engines import Workload, adaptive_engine

SAMPLED = Sampling(0.8)


def test_a_tree_is_no_deeper_than_the_block():
    target = tiny_target()
    for asked, built in (
        (BlockTree(), (8, 5, 32)),
        (BlockTree(2, 16, 100), (2, 5, 63)),
        (BlockTree(3, 4, 9), (3, 4, 9)),
    ):
        policy = Engine(target, DRAFTERS["dflash"](target), asked).policy
        assert (policy.topk, policy.steps, policy.num_draft_tokens) == built


def test_cuts_by_confidence():
    """From nearly nothing to everything cut, the text stays the same. A cut needs a confidence head."""
    target, prompts = tiny_target(), [[3, 5, 7], [1], [2] * 9]
    expected = [row.tokens for row in Engine(target).generate(prompts, max_new_tokens=20).rows]
    for kind, cut in (("dspark", 0.05), ("dspark", 0.999), ("dflash", 0.5)):
        drafter = DRAFTERS[kind](target)
        drafter.cut = cut
        engine = Engine(target, drafter, Chain(5))
        if kind == "dflash":
            with pytest.raises(ValueError, match="no confidence head"):
                engine.generate(prompts, max_new_tokens=3)
        else:
            assert [row.tokens for row in engine.generate(prompts, max_new_tokens=20).rows] == expected


def test_an_adaptive_policy_by_name_goes_no_deeper_than_the_block(tmp_path, monkeypatch):
    """A block tree may be deeper than the drafter's block. The engine bounds it, and the policy must too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    target, prompts = tiny_target(), [[3, 5, 7], [1]]
    drafter, tree = DRAFTERS["dflash"](target), BlockTree(3, 16, 12)
    expected = [row.tokens for row in Engine(target).generate(prompts, max_new_tokens=20).rows]
    for name in ("fixed", "ema", "survival", f"table:1={drafter.block}"):
        engine = adaptive_engine(name, Workload(2), target, drafter, tree)
        assert [row.tokens for row in engine.generate(prompts, max_new_tokens=20).rows] == expected
    with pytest.raises(ValueError, match=f"the tree has {drafter.block}"):
        adaptive_engine("table:1=16", Workload(2), target, drafter, tree)


def test_a_policy_gets_numbers_of_nodes_without_any_probability():
    """A selector proposes fewer tokens than the tree has children; the other children have probability 0."""
    target, reported = tiny_target(), []
    drafter = tiny_block(target, conditional="selector", head={"candidates": 2})

    class Watch(Restless):
        def keep(self, draft):
            reported.append(draft.edges)

    for sampling in (Sampling(), SAMPLED):
        engine = Engine(target, drafter, DynamicTree(4, 3, 20), adaptive=Watch(3))
        engine.generate([[3, 5, 7], [1]], max_new_tokens=20, sampling=sampling)
    assert any((edges < NEVER + 1).any() for edges in reported)
    assert all(np.isfinite(edges).all() for edges in reported)
