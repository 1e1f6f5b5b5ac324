"""Step j of the training-time test and level j of the decoder are the same numbers."""

import pytest
import torch
from golden_blocks import absorb
from helpers import (
    BLOCKS,
    DRAFTERS,
    LEARNERS,
    MORE_BLOCKS,
    PARALLEL,
    assert_close_in_fp32,
    tiny_block,
    tiny_drafter,
    tiny_parallel,
    tiny_target,
)

from specdec.children import LIKELIEST
from specdec.contracts import Drafter
from specdec.drafters.recurrent import RecurrentDrafter


@pytest.mark.parametrize("kind", LEARNERS)
@pytest.mark.parametrize("prefix", [1, 4, 9])
def test_unrolled_step_equals_decoding_level(prefix, kind):
    """Decode a chain whose tokens are the text itself: level j after prefix t then sees what row t of step j sees."""
    steps, length = 5, 16
    target = tiny_target()
    drafter = tiny_drafter(target, draft_vocab=8, kind=kind)
    torch.manual_seed(0)
    feats = torch.randn(2, length, len(drafter.taps) * target.config.hidden)
    tokens = torch.randint(17, (2, length))  # token t+1 for feature t
    with torch.no_grad():
        unrolled = list(drafter.unroll(feats, tokens, steps))
        state = absorb(drafter, feats[:, :prefix], tokens[:, :prefix])
        for j, expected in enumerate(unrolled):
            torch.testing.assert_close(state.logits[:, 0], expected.logits[:, prefix - 1], rtol=0, atol=1e-5)
            torch.testing.assert_close(state.hidden[:, 0], expected.hidden[:, prefix - 1], rtol=0, atol=1e-5)
            sees_all = torch.ones(2, 1, j + 1, dtype=torch.bool)
            if j + 1 == steps:
                break
            state = drafter.step(tokens[:, prefix + j : prefix + j + 1], state.hidden, j + 1, sees_all)


KINDS = BLOCKS | MORE_BLOCKS | {"domino, confidence": BLOCKS["domino"] | {"confidence": True}}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefix", [1, 4, 9])
@torch.no_grad()
def test_a_slot_in_training_is_the_slot_in_decoding(prefix, kind):
    """Two documents in a row: the block after a row sees none of the other, and nothing that follows."""
    length, target = 16, tiny_target()
    drafter = tiny_block(target, **KINDS[kind])
    torch.manual_seed(0)
    feats = torch.randn(2, length, 2 * target.config.hidden)
    tokens = torch.randint(17, (2, length))
    drafter.documents = (torch.arange(length) >= 11).long().expand(2, length)
    unrolled = list(drafter.unroll(feats, tokens, drafter.block))
    rows = torch.tensor([[2, 8, 13], [1, 5, 15]])  # the same at sampled anchors, and no other block is seen
    sampled, at = drafter.blocks(feats, tokens, rows), torch.arange(2)[:, None]
    for j, expected in enumerate(unrolled):
        logits = sampled.head(sampled.readout[:, :, j])
        torch.testing.assert_close(logits, expected.logits[at, rows], rtol=1e-5, atol=1e-5)
    sure = drafter.blocks(feats, tokens, torch.arange(length).expand(2, -1)).confidence
    for first in (0, 11):
        n = min(prefix, length - first)
        rows = slice(first, first + n)
        block = absorb(drafter, feats[:, rows], tokens[:, rows])
        state, inside = drafter.root(block), min(length - first - n, drafter.block - 1) + 1
        if sure is not None:
            drafted = tokens[:, first + n : first + n + inside - 1]
            drafted = torch.cat([drafted, drafted.new_zeros(2, 1)], 1)  # the last one is not looked at
            confident = drafter.confidences(block, drafted)
            torch.testing.assert_close(confident, sure[:, first + n - 1, :inside], rtol=1e-5, atol=1e-5)
        for j, expected in enumerate(unrolled):
            torch.testing.assert_close(state.logits[:, 0], expected.logits[:, first + n - 1], rtol=1e-5, atol=1e-5)
            if first + n + j == length or j + 1 == drafter.block:
                break
            state = drafter.expand(block, tokens[:, first + n + j, None], state.hidden, j + 1, None)
    feats[:, prefix:11], tokens[:, prefix:11] = 9.0, 3  # a corrupted future, which slot 0 must not see
    again = next(drafter.unroll(feats, tokens, 1))
    torch.testing.assert_close(again.logits[:, prefix - 1], unrolled[0].logits[:, prefix - 1], rtol=0, atol=0)


@pytest.mark.parametrize("kind", [*LEARNERS, *BLOCKS, *PARALLEL])
@torch.no_grad()
def test_extending_in_pieces_equals_extending_at_once(kind):
    """What a tree, mask rows and padding leave in the cache is overwritten. Ragged rows do not disturb each other."""
    target = tiny_target()
    drafter = tiny_parallel(target, kind) if kind in PARALLEL else DRAFTERS[kind](target)
    feats, tokens = torch.randn(2, 9, len(drafter.taps) * 32), torch.randint(17, (2, 9))
    whole, done = absorb(drafter, feats, tokens).logits, torch.tensor([3, 2])
    state = absorb(drafter, feats[:, :4], tokens[:, :4], lens=done)
    for n in (torch.tensor([2, 3]), torch.tensor([4, 0]), torch.tensor([0, 4])):
        if drafter.block is None:
            own = torch.eye(2, dtype=torch.bool).expand(2, 2, 2)
            drafter.step(tokens[:, :2], state.hidden.expand(2, 2, -1), 1, own)
        at = (done[:, None] + torch.arange(4)).clamp(max=8)  # more than is absorbed: the rest is scratch
        piece = feats.gather(1, at[..., None].expand(-1, -1, feats.shape[-1])), tokens.gather(1, at), n
        state, done = drafter.extend(*piece, 13), done + n
        for row in range(2):
            if n[row] and done[row] == 9:
                assert_close_in_fp32(state.logits[row], whole[row])
    assert done.tolist() == [9, 9]


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", LEARNERS)
def test_unrolling_only_the_needed_rows_changes_nothing_of_them(kind, recompute, documents):
    steps, shape = 4, (3, 11)
    target = tiny_target()
    drafter = tiny_drafter(target, draft_vocab=8, kind=kind)
    drafter.recompute = recompute
    drafter.documents = (torch.arange(11) >= 5).long().expand(shape) if documents else None
    torch.manual_seed(0)
    feats, tokens = torch.randn(*shape, len(drafter.taps) * target.config.hidden), torch.randint(17, shape)
    needed = torch.rand(shape) < 0.4
    needed[1] = False  # a text without training tokens

    def states_and_gradients(*given: torch.Tensor) -> tuple[list, list]:
        drafter.zero_grad()
        states = list(drafter.unroll(feats, tokens, steps, *given))
        readouts = [states[0].readout, *(s.readout[needed] for s in states[1:])]
        sum(x.sin().sum() for x in readouts).backward()
        hidden = [states[0].hidden, *(s.hidden[needed] for s in states[1:])]
        return readouts + hidden, [p.grad for p in drafter.parameters() if p.grad is not None]

    for ours, expected in zip(states_and_gradients(needed), states_and_gradients(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [*LEARNERS, *BLOCKS, "peagle", "pard2"])
def test_what_learns_is_not_the_target(name):
    """Else training a drafter would change the target's own text."""
    target = tiny_target()
    drafter = DRAFTERS[name](target)
    shared = {weight.untyped_storage().data_ptr() for weight in target.parameters()}
    learns = {at: weight for at, weight in drafter.named_parameters() if weight.requires_grad}
    assert not [at for at, weight in learns.items() if weight.untyped_storage().data_ptr() in shared]


# A recurrent drafter makes what all levels of a chain need at once: that changes no bit of the chain

LENS, STEPS = (9, 4, 1), 5


def drafted(drafter: RecurrentDrafter, chain) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Tokens, log-probabilities, and what the cache holds afterwards, by one of two `chain` methods."""
    torch.manual_seed(3)
    rows, longest = len(LENS), max(LENS)
    width = len(drafter.taps) * drafter.shape.hidden
    feats, tokens = torch.randn(rows, longest, width), torch.randint(drafter.vocab.target_size, (rows, longest))
    drafter.reset(rows + 1, longest + STEPS)  # a row more than are in use
    state = drafter.admit(0, tokens[:, 0], feats, tokens, torch.tensor(LENS))
    return *chain(drafter, state, STEPS, LIKELIEST), drafter.cache.memory


@torch.inference_mode()
@pytest.mark.parametrize("draft_vocab", [None, 7])
@pytest.mark.parametrize("kind", [kind for kind in LEARNERS if "medusa" not in kind])
def test_a_chain_is_its_levels_one_by_one(kind, draft_vocab):
    drafter = tiny_drafter(tiny_target(), draft_vocab=draft_vocab, kind=kind)
    at_once, one_by_one = (drafted(drafter, of.chain) for of in (type(drafter), Drafter))
    assert type(drafter).chain is RecurrentDrafter.chain
    assert not drafter.ahead, "a tree drafted next would go by the chain's places"
    for ours, theirs in zip(at_once[:2], one_by_one[:2], strict=True):
        assert torch.equal(ours, theirs)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(at_once[2], one_by_one[2], strict=True))


@torch.inference_mode()
def test_a_chain_that_fails_leaves_nothing_behind():
    drafter = tiny_drafter(tiny_target())

    def fails(*inputs):
        raise RuntimeError("no children")

    with pytest.raises(RuntimeError, match="no children"):
        drafted(drafter, lambda drafter, state, *rest: drafter.chain(state, 3, type("Fails", (), {"best": fails})()))
    assert not drafter.ahead
