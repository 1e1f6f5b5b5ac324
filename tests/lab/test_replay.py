"""Replay equals reality, round by round."""

from itertools import product

import pytest
import torch
from helpers import DRAFTERS, tiny_target

from specdec.engine.engine import Engine
from specdec.recording import Recording, Text
from specdec.structs import Sampling
from specdec.trees import BlockTree, Chain, DynamicTree, SampledTree, StaticTree
from specdec.trees.record import answers_to, record

PROMPTS = [[3, 5, 7, 9], [1], [8, 2, 6]]
EOS = frozenset({4})
HOW = {"max_new_tokens": 25, "eos": EOS}
SETTINGS = [(1, 2, 3), (2, 3, 5), (3, 2, 2), (3, 3, 9), (3, 3, 22)]
KINDS = ("eagle3", "eagle", "mtp-two-heads-pre-norm", "medusa", "lookup", "suffix", "draft-model", "dflash", "dflash2")
FILTERS = (Sampling(0.8), Sampling(0.8, 7, 0.95))
BLOCK_TREES = [BlockTree(*shape) for shape in (
    (1, 3, 4), (2, 1, 3), (2, 3, 6), (3, 2, 8), (3, 3, 12), (4, 4, 9), (4, 5, 14), (5, 2, 20), (6, 5, 24), (5, 16, 40),
)]  # fmt: skip
AMONG_FOUR = StaticTree([[0], [1], [3], [0, 0], [3, 1], [3, 1, 0], [0, 0, 2]])  # a selector's candidates
STATIC = StaticTree([[0], [1], [5], [0, 0], [5, 1], [5, 1, 0], [0, 0, 4]])


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def recorded(
    target, drafter, prompts=PROMPTS, *, outputs=None, seed=0, max_new_tokens=25, eos=EOS, sampling=None, **how
) -> Recording:
    """Along answers of the target, or along these outputs."""
    if outputs is None:
        texts = answers_to(target, prompts, sampling, seed=seed, max_new_tokens=max_new_tokens, eos=eos)
        sampling = None  # the texts know it
    else:
        texts = [Text(*pair, (seed, i)) for i, pair in enumerate(zip(prompts, outputs, strict=True))]
    return record(target, drafter, texts, sampling=sampling, **how)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("kind", "sampling", "children"),
    [
        *product(KINDS, [Sampling()], [None]),
        *product(("eagle3", "mtp-two-heads-pre-norm", "suffix"), FILTERS, ("coupled", "likeliest")),
    ],
    ids=lambda value: f"t{value.temperature}-k{value.top_k}" if isinstance(value, Sampling) else str(value),
)
def test_rounds_are_those_of_real_runs(target, kind, sampling, children):
    """What the target draws is settled by seed and position, so one recording holds the rounds of every tree."""
    drafter, abstains = DRAFTERS[kind](target), kind in ("lookup", "suffix")
    how, asked = HOW | {"sampling": sampling, "seed": 5}, {"children": children} if children else {}
    recording = recorded(target, drafter, PROMPTS, topks=(1, 2, 3), steps=3, **how, **asked)
    if sampling.greedy:
        assert {text.tokens[-1] in EOS for text in recording.texts} == {True, False}, "both ends should be there"
    trees = [*(DynamicTree(*setting) for setting in SETTINGS), Chain(3)]
    if not abstains:  # their children tie, and `topk` breaks ties in an order of its own
        trees.append(AMONG_FOUR if kind == "dflash2" else STATIC)
    accepted = 0
    for tree, replayed in zip(trees, recording.replay_many(trees), strict=True):
        rows = Engine(target, drafter, tree, children=children).generate(PROMPTS, **how).rows
        assert [text.tokens for text in recording.texts] == [row.tokens for row in rows]
        assert replayed.rows == [row.trace for row in rows]
        if abstains:  # as often as the rows' traces say
            drafted = [levels > 0 for row in replayed.drafted for levels in row]
            assert drafted.count(False) == sum(row.trace.undrafted for row in rows) > 0
            assert replayed.levels == pytest.approx(sum(map(sum, replayed.drafted)) / len(drafted))
        else:
            assert (replayed.nodes, replayed.levels) == (tree.num_draft_tokens, tree.steps)
        accepted += sum(map(sum, (row.accepted for row in replayed.rows)))
    assert accepted > 0, "nothing was accepted: the test shows nothing"


@pytest.mark.parametrize("children", [None, "coupled", "likeliest"], ids=["greedy", "coupled", "likeliest"])
def test_trees_over_blocks(target, children):
    """Ten settings from one recording; the last is bounded by the block alone."""
    drafter, how = DRAFTERS["dflash"](target), HOW | ({"sampling": Sampling(0.8), "seed": 5} if children else {})
    options = {"children": children} if children else {}
    recording = recorded(target, drafter, PROMPTS, topks=(1, 2, 6), steps=5, **options, **how)
    accepted = set()
    for tree, replayed in zip(BLOCK_TREES, recording.replay_many(BLOCK_TREES), strict=True):
        rows = Engine(target, drafter, tree, children=children).generate(PROMPTS, **how).rows
        assert replayed.rows == [row.trace for row in rows]
        assert (replayed.nodes, replayed.levels) == (tree.num_draft_tokens, min(tree.steps, 5))
        accepted.add(sum(map(sum, (row.accepted for row in replayed.rows))))
    assert len(accepted) > 3, "the trees accept alike: the test shows little"
    for whole in ((1, 3, 4), (2, 2, 7)):  # trees of all nodes are the same as dynamic ones
        assert recording.replay(BlockTree(*whole)).rows == recording.replay(DynamicTree(*whole)).rows


def test_what_was_not_recorded_cannot_be_replayed(target):
    drafter, conditioned = DRAFTERS["dflash"](target), DRAFTERS["dflash2"](target)
    how = {"prompts": PROMPTS[:1], "topks": (2,), "max_new_tokens": 4}
    recording, of_conditioned = (recorded(target, each, steps=3, **how) for each in (drafter, conditioned))
    for message, replayed, tree in (
        ("the 2 best tokens of a slot were recorded", recording, BlockTree(3, 2, 4)),
        ("4 levels deep, but 3 were recorded", recording, BlockTree(2, 4, 4)),
        ("do not depend on each other", of_conditioned, BlockTree(2, 3, 4)),
        ("topk 4 was not recorded; recorded were 2", recording, DynamicTree(4, 2, 5)),
        ("4 levels deep, but 3 were recorded", recording, DynamicTree(2, 4, 5)),
        ("SampledTree cannot be replayed", recording, SampledTree([1])),
    ):
        with pytest.raises(ValueError, match=message):
            replayed.replay(tree)
    with pytest.raises(ValueError, match="guesses 5 tokens ahead"):
        recorded(target, drafter, steps=6, **how)


def test_pieces_and_batches_change_nothing(target, monkeypatch):
    drafter, how = DRAFTERS["eagle3"](target), {"topks": (3,), "steps": 3, "sampling": Sampling(0.9)}
    whole = recorded(target, drafter, PROMPTS * 2, **how)
    monkeypatch.setattr("specdec.trees.record.PIECE", 4)
    outputs = [text.tokens for text in whole.texts]
    cut = recorded(target, drafter, PROMPTS * 2, **how, outputs=outputs, batch=3)
    for name, ranks in whole.tensors.items():
        assert torch.equal(ranks, cut.tensors[name]), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "at least 1"),
        ({"topks": (0,)}, "at least 1"),
        ({"topks": (9,)}, "vocabulary has 8 tokens only"),
        ({"max_new_tokens": 254}, "decode fewer new tokens"),
        ({"prompts": []}, "no text was given"),
        ({"outputs": [[1], [], [1]]}, "a text has no token"),
        ({"outputs": [[1], [2], [3]]}, "no round to replay"),
        ({"sampling": Sampling(presence_penalty=0.5)}, "under penalties cannot be replayed"),
    ],
)
def test_what_cannot_be_recorded(target, change, message):
    drafter, settings = DRAFTERS["eagle3"](target), {"topks": (2,), "steps": 2, "max_new_tokens": 3, "eos": frozenset()}
    with pytest.raises(ValueError, match=message):
        recorded(target, drafter, **settings | change)


def test_the_text_that_starts_last_may_have_the_fewest_roots(target):
    """Its row has ended when the others draft on, and no place after the longest text is read."""
    texts = [Text([3, 5, 7, 9] * 5, [1, 2]), Text([8], [2, 6, 2, 6] * 4)]
    for kind in ("lookup", "suffix", "eagle3"):
        drafter, how = DRAFTERS[kind](target), {"topks": (8,), "steps": 3}  # more nodes than the text has tokens left
        both = record(target, drafter, texts, **how)
        alone = [record(target, drafter, [text], **how).tensors["ranks"] for text in texts]
        assert torch.equal(both.tensors["ranks"], torch.cat(alone)), kind
