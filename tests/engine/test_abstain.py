"""A drafter that has nothing to propose, or less than the tree has room for, and drafters of blocks."""

import numpy as np
import pytest
import torch
from helpers import DRAFTERS, pvalue_of_tokens_2_and_3, texts_of, tiny_block, tiny_drafter, tiny_target
from policies import Restless
from tape import Interpreted, Tape

from specdec import Engine, Recorder, Sampling
from specdec.drafters.draft_model import DraftModel
from specdec.engine.controller import NEVER
from specdec.engine.trace_files import read_trace, write_trace
from specdec.lab.traces import metrics
from specdec.lab.wrapped import WrappedDrafter
from specdec.trees import BlockTree, Chain, DynamicTree, SampledTree, StaticTree
from specdec.tuning.engines import Workload, adaptive_engine
from specdec.verify import BlockVerification, MultiRoundRejection

TREES = {
    "chain": Chain(4),
    "dynamic": DynamicTree(3, 3, 10),
    "static": StaticTree([[0], [1], [0, 0], [0, 2], [1, 0], [0, 2, 0]]),
    "sampled": SampledTree((2, 1, 1)),
}
PROMPTS = [[3, 5, 7, 2] * 3, [1, 8, 9, 10, 4], [6]]


def wanted(committed):
    return committed * 5 // 3 % 4


class Shy(WrappedDrafter):
    """Proposes 0 to 3 levels, by the number of committed tokens, or 0 to 2 by the last one."""

    by_token = False

    def reset(self, rows, slots):
        super().reset(rows, slots)
        self.lens = torch.zeros(0, dtype=torch.int64)

    def admit(self, row, first, feats, tokens, n):
        self.lens = torch.cat([self.lens[:row], n])
        return self.limited(super().admit(row, first, feats, tokens, n), n, tokens, n)

    def extend(self, feats, tokens, n, max_len):
        self.lens = self.lens + n
        return self.limited(super().extend(feats, tokens, n, max_len), self.lens, tokens, n)

    def limited(self, state, committed, tokens, n):
        last = tokens.gather(1, (n[:, None] - 1).clamp(min=0)).squeeze(1)
        state.levels = last % 3 if self.by_token else wanted(committed)
        return state

    def compact(self, survivors):
        super().compact(survivors)
        self.lens = self.lens[survivors.index]


@pytest.mark.parametrize(
    ("tree", "columns", "abstain"),
    [("chain", {1, 2, 3, 4}, True), ("dynamic", {1, 10}, True), ("static", {1, 3, 6, 7}, True),
     ("sampled", {1, 3, 5, 7}, True), ("chain", {5}, False)],
)  # fmt: skip
def test_rounds_shrink_to_what_is_proposed(tree, columns, abstain):
    """The first levels of a static or drawn tree do not depend on deeper levels; those of a dynamic tree do."""
    target, seen = tiny_target(), set()
    engine = Engine(target, Shy(DraftModel(tiny_target())), TREES[tree], abstain=abstain)
    target.register_forward_hook(
        lambda _, inputs, how, out: None if how.get("prefill") else seen.add(inputs[0].shape[1]), with_kwargs=True
    )
    (row,) = engine.generate(PROMPTS[:1], max_new_tokens=60, eos=frozenset()).rows
    assert seen == columns
    if tree == "chain" and abstain:  # the drafter is the target: everything that is proposed is accepted
        committed = len(row.prompt)
        for accepted in row.trace.accepted:
            assert accepted == wanted(committed)
            committed += 1 + accepted


@pytest.mark.parametrize("backend", [Tape, Interpreted], ids=["captured", "compiled"])
@pytest.mark.parametrize("tree", ["chain", "dynamic", "static"])
@pytest.mark.parametrize("name", ["lookup", "suffix", "dspark"])
def test_captured_rounds_accept_no_more_than_is_proposed(name, tree, backend, unpacked):
    """A round that may still run when it is read drafts all levels. Others are plain where nothing is proposed."""
    target = tiny_target()
    drafter = DRAFTERS[name](target)
    if name == "dspark":
        drafter.cut = 0.5
    how = {"max_new_tokens": 40, "sampling": SAMPLED, "eos": frozenset()}
    expected = Engine(target, drafter, TREES[tree]).generate(PROMPTS, **how).rows
    engine = Engine(target, drafter, TREES[tree], graphs=backend())
    found = engine.generate(PROMPTS, **how).rows
    assert [row.tokens for row in found] == [row.tokens for row in expected]
    assert [row.trace for row in found] == [row.trace for row in expected]
    assert sum(row.trace.undrafted for row in found)
    assert {levels for *_, levels in engine.graphs.batch.graphs} == ({None} if backend is Tape else {None, 0})


@pytest.mark.parametrize("verifier", [MultiRoundRejection(), BlockVerification()], ids=str)
@torch.inference_mode()
def test_sampled_text_follows_the_target(verifier):
    """The last token of a row decides how many levels are drafted for it."""
    target, sampling = tiny_target(vocab=11), Sampling(1.0)
    drafter = Shy(tiny_drafter(target, draft_vocab=8))
    drafter.by_token = True
    tree = SampledTree((1, 1) if verifier.chains_only else (2, 1))
    engine = Engine(target, drafter, tree, verifier)
    result = engine.generate([[3, 1, 4]] * 4000, max_new_tokens=3, sampling=sampling, seed=7)
    assert pvalue_of_tokens_2_and_3(target, [3, 1, 4], sampling, result) > 1e-3
    assert sum(a for row in result.rows for a in row.trace.accepted) > 4000 / 20
    assert 0 < sum(row.trace.undrafted > 0 for row in result.rows) < 4000


def test_traces_tell_what_was_drafted_for_a_row(tmp_path):
    """A trace leaves out nodes that were computed for another row only."""
    target = tiny_target()
    engine = Engine(target, Shy(tiny_drafter(target)), TREES["chain"])
    recorder = Recorder()
    rows = engine.generate(PROMPTS, max_new_tokens=30, observer=recorder).rows
    write_trace(recorder.trace, tmp_path / "trace")
    traced = read_trace(tmp_path / "trace").rows
    assert [row.trace for row in traced] == [row.trace for row in rows]
    for row in traced:
        committed = len(row.prompt)
        for r in row.rounds:
            assert r.drafted == wanted(committed)
            assert (r.tree is None) == (r.drafted == 0)
            assert r.accepted <= r.drafted
            committed += r.accepted + 1
        assert row.steps == 3
    share = metrics.undrafted_share(traced)
    assert 0 < share == sum(row.trace.undrafted for row in rows) / sum(row.trace.rounds for row in rows) < 1


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


def test_a_cut_needs_a_confidence_head():
    target = tiny_target()
    drafter = DRAFTERS["dflash"](target)
    drafter.cut = 0.5
    with pytest.raises(ValueError, match="no confidence head"):
        Engine(target, drafter, Chain(5)).generate([[3, 5, 7]], max_new_tokens=3)


def test_an_adaptive_policy_by_name_goes_no_deeper_than_the_block(tmp_path, monkeypatch):
    """A block tree may be deeper than the drafter's block. The engine bounds it, and the policy must too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    target, prompts = tiny_target(), [[3, 5, 7], [1]]
    drafter, tree = DRAFTERS["dflash"](target), BlockTree(3, 16, 12)
    expected = texts_of(Engine(target), prompts, max_new_tokens=20)
    for name in ("fixed", "ema", "survival", f"table:1={drafter.block}"):
        engine = adaptive_engine(name, Workload(2), target, drafter, tree)
        assert texts_of(engine, prompts, max_new_tokens=20) == expected
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
