"""A drafter that has nothing to propose, or less than the tree has room for: rounds shrink to what there is."""

import pytest
import torch
from helpers import pvalue_of_tokens_2_and_3, tiny_drafter, tiny_target

from specdec.drafters import ngram
from specdec.drafters.draft_model import DraftModel
from specdec.engine.engine import Engine
from specdec.engine.recorder import Recorder
from specdec.engine.trace_files import read_trace, write_trace
from specdec.lab.traces import metrics
from specdec.lab.wrapped import WrappedDrafter
from specdec.structs import Sampling
from specdec.trees import Chain, DynamicTree, SampledTree, StaticTree
from specdec.verify import BlockVerification, MultiRoundRejection

TREES = {
    "chain": Chain(4),
    "dynamic": DynamicTree(3, 3, 10),
    "static": StaticTree([[0], [1], [0, 0], [0, 2], [1, 0], [0, 2, 0]]),
    "sampled": SampledTree((2, 1, 1)),
}
PROMPTS = [[3, 5, 7, 2] * 3, [1, 8, 9, 10, 4], [6]]


class Shy(WrappedDrafter):
    """Proposes 0 to 3 levels, by the number of committed tokens."""

    def reset(self, rows, slots):
        super().reset(rows, slots)
        self.lens = torch.zeros(0, dtype=torch.int64)

    def admit(self, row, first, feats, tokens, n):
        self.lens = torch.cat([self.lens[:row], n])
        state = super().admit(row, first, feats, tokens, n)
        state.levels = self.wanted(n)
        return state

    def extend(self, feats, tokens, n, max_len):
        self.lens = self.lens + n
        state = super().extend(feats, tokens, n, max_len)
        state.levels = self.wanted(self.lens)
        return state

    def compact(self, survivors):
        super().compact(survivors)
        self.lens = self.lens[survivors.index]

    @staticmethod
    def wanted(n):
        return n * 5 // 3 % 4


DRAFTERS = {
    "lookup": lambda target: ngram.create(target),
    "suffix": lambda target: ngram.create(target, mode="suffix", reach=None),
    "eagle3": lambda target: Shy(tiny_drafter(target)),
    "medusa": lambda target: Shy(tiny_drafter(target, kind="medusa")),
    "draft-model": lambda target: Shy(DraftModel(target)),
}


@pytest.mark.matrix
@pytest.mark.parametrize("overlap", [False, True], ids=["at once", "overlapped"])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_text_is_plain_decodings(drafter, tree, overlap):
    """A row has the same text and the same rounds alone and next to rows that draft more or less."""
    target = tiny_target()
    plain = [Engine(target).generate([p], max_new_tokens=40).rows[0].tokens for p in PROMPTS]
    engine = Engine(target, DRAFTERS[drafter](target), TREES[tree], overlap=overlap)
    alone = [engine.generate([p], max_new_tokens=40).rows[0] for p in PROMPTS]
    together = engine.generate(PROMPTS, max_new_tokens=40).rows
    assert [row.tokens for row in alone] == [row.tokens for row in together] == plain
    assert [row.trace for row in alone] == [row.trace for row in together]
    rounds, undrafted = (sum(x) for x in zip(*((r.trace.rounds, r.trace.undrafted) for r in together), strict=True))
    assert 0 < undrafted < rounds, "all rounds drafted, or none: the test shows nothing"
    assert sum(sum(row.trace.accepted) for row in together) > 0, "nothing was accepted: the test shows nothing"


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
            assert accepted == Shy.wanted(committed)
            committed += 1 + accepted


@pytest.mark.parametrize("verifier", [MultiRoundRejection(), BlockVerification()], ids=str)
@torch.inference_mode()
def test_sampled_text_follows_the_target(verifier):
    """The last token of a row decides how many levels are drafted for it."""

    class ByToken(Shy):
        def extend(self, feats, tokens, n, max_len):
            state = super().extend(feats, tokens, n, max_len)
            state.levels = tokens[:, 0] % 3
            return state

        def admit(self, row, first, feats, tokens, n):
            state = super().admit(row, first, feats, tokens, n)
            state.levels = tokens.gather(1, n[:, None] - 1).squeeze(1) % 3
            return state

    target, sampling = tiny_target(vocab=11), Sampling(1.0)
    tree = SampledTree((1, 1) if verifier.chains_only else (2, 1))
    engine = Engine(target, ByToken(tiny_drafter(target, draft_vocab=8)), tree, verifier)
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
            assert r.drafted == int(Shy.wanted(committed))
            assert (r.tree is None) == (r.drafted == 0)
            assert r.accepted <= r.drafted
            committed += r.accepted + 1
        assert row.steps == 3
    share = metrics.undrafted_share(traced)
    assert 0 < share == sum(row.trace.undrafted for row in rows) / sum(row.trace.rounds for row in rows) < 1
