"""A drafter that has nothing to propose, or less than the tree has room for: rounds shrink to what there is."""

import pytest
import torch
from helpers import pvalue_of_tokens_2_and_3, tiny_drafter, tiny_target
from tape import NoHostSync

from specdec.drafters import ngram
from specdec.drafters.draft_model import DraftModel
from specdec.engine.batch import Batch
from specdec.engine.clock import Clock
from specdec.engine.engine import Engine
from specdec.engine.recorder import Recorder
from specdec.engine.sequence import Sequence
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
# One that repeats itself, one without any token twice, one of a single token.
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

    def compact(self, kept):
        super().compact(kept)
        self.lens = self.lens[kept.index]

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


def columns_of(target) -> list[int]:
    """How many columns each forward over a batch that decodes has, from now on."""
    seen = []

    def note(_, inputs, keywords):
        if not keywords.get("prefill"):
            seen.append(inputs[0].shape[1])

    target.register_forward_pre_hook(note, with_kwargs=True)
    return seen


@pytest.mark.matrix
@pytest.mark.parametrize("overlap", [False, True], ids=["at once", "overlapped"])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_text_is_plain_decodings(drafter, tree, overlap):
    """Alone, and in a batch in which rows draft while others do not. A row's rounds are those that it has alone."""
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


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("tree", [Chain(4), StaticTree([[0], [1], [0, 0], [0, 0, 0]])], ids=["chain", "static"])
def test_all_that_an_oracle_proposes_is_accepted(tree, rows):
    """A draft model that is its own target: plain rounds and rounds that were cut leave its cache as it should be."""
    target = tiny_target()
    engine = Engine(target, Shy(DraftModel(target)), tree)
    for row in engine.generate(PROMPTS[:rows], max_new_tokens=60, eos=frozenset()).rows:
        expected, committed = [], len(row.prompt)
        while committed + 1 < len(row.prompt) + len(row.tokens):
            expected.append(Shy.wanted(committed))
            committed += 1 + expected[-1]
        assert row.trace.accepted == expected
        assert row.trace.undrafted == expected.count(0) > 0


def test_the_forward_has_as_many_columns_as_the_longest_proposal():
    target = tiny_target()
    drafter = Shy(tiny_drafter(target))
    seen, widths = columns_of(target), set()
    for prompts in (PROMPTS[:1], PROMPTS):
        engine, wanted = Engine(target, drafter, TREES["chain"], compact=False), []

        def watch(report, engine=engine, wanted=wanted):
            going = [row for row in report.rows if row.finish is None]
            if going:
                wanted.append(1 + max(int(Shy.wanted(torch.tensor(row.committed))) for row in going))

        seen.clear()
        engine.generate(prompts, max_new_tokens=30, observer=watch)
        assert seen == wanted
        widths |= set(seen)
    assert widths == {1, 2, 3, 4}


@pytest.mark.parametrize(
    ("tree", "columns"), [("dynamic", {1, 10}), ("static", {1, 3, 6, 7}), ("sampled", {1, 3, 5, 7})]
)
def test_other_trees_shrink_too(tree, columns):
    """The first levels of a static or a drawn tree do not depend on the others; those of a dynamic one do."""
    target = tiny_target()
    engine = Engine(target, Shy(tiny_drafter(target)), TREES[tree])
    seen = columns_of(target)
    engine.generate(PROMPTS[:1], max_new_tokens=60, eos=frozenset())
    assert set(seen) == columns


def test_whoever_times_rounds_gets_whole_ones():
    target = tiny_target()
    engine = Engine(target, Shy(tiny_drafter(target)), TREES["chain"], abstain=False)
    seen = columns_of(target)
    rows = engine.generate(PROMPTS, max_new_tokens=30).rows
    assert set(seen) == {5}
    assert all(row.trace.undrafted == 0 for row in rows)


@pytest.mark.parametrize("verifier", [MultiRoundRejection(), BlockVerification()], ids=str)
@torch.inference_mode()
def test_sampled_text_follows_the_target(verifier):
    """Rows in which the first token decides how much is drafted, in one batch: some nothing, some less than others."""

    class ByToken(Shy):
        @staticmethod
        def wanted(n):
            return n

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
    """Of each row as if it were alone: nodes that were computed for the sake of another row are not its own."""
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


@torch.inference_mode()
def test_a_round_that_is_told_does_not_wait():
    target = tiny_target()
    engine = Engine(target, tiny_drafter(target), TREES["chain"])
    batch = Batch(engine.round, 2, 24, Clock(engine.device))
    batch.admit([Sequence(prompt, 20) for prompt in ([1, 2, 3], [4])])
    root, state, active, levels = batch.root, batch.state, torch.tensor([True, True]), torch.tensor([0, 2])
    batch.cache.max_len = 3
    for most in (0, 2, 4, None):
        engine.round.play(root, state, batch.cache, active, batch.settings, None, levels, most)
        batch.cache.lens.copy_(torch.tensor([3, 1]))
        batch.cache.max_len = 3
        with NoHostSync():
            engine.round.play(root, state, batch.cache, active, batch.settings, None, levels, most)


@pytest.mark.parametrize("tree", ["chain", "static"])
@torch.inference_mode()
def test_a_shallower_tree_is_the_first_levels(tree):
    target = tiny_target()
    drafter, policy = tiny_drafter(target), TREES[tree]
    drafter.reset(1, 40)
    feats = torch.randn(1, 3, len(drafter.taps) * 32)
    state = drafter.admit(0, torch.tensor([1]), feats, torch.tensor([[2, 3, 4]]), torch.tensor([3]))
    whole = policy.grow(drafter, torch.tensor([4]), state)
    for steps in range(1, policy.steps + 1):
        part = policy.shallower(steps).grow(drafter, torch.tensor([4]), state)
        count = int((whole.depth <= steps).sum())
        assert part.steps == steps
        assert part.tokens.shape[1] == count
        assert torch.equal(part.tokens, whole.tokens[:, :count])
        assert torch.equal(part.parents, whole.parents[:, :count])
        assert torch.equal(part.ancestors, whole.ancestors[:, :count, :count])
        torch.testing.assert_close(part.logq, whole.logq[:, :count])
