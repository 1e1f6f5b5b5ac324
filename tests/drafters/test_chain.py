"""A recurrent drafter makes what all levels of a chain need at once: that changes no bit of the chain."""

import pytest
import torch
from helpers import LEARNERS, tiny_drafter, tiny_target

from specdec.children import LIKELIEST
from specdec.contracts import Drafter
from specdec.drafters.recurrent import RecurrentDrafter

KINDS = [kind for kind in LEARNERS if "medusa" not in kind]
LENS, STEPS = (9, 4, 1), 5


def drafted(drafter: RecurrentDrafter, chain) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Tokens, log-probabilities, and what the cache holds afterwards, by one of two `chain` methods."""
    torch.manual_seed(3)
    rows, longest = len(LENS), max(LENS)
    width = len(drafter.taps) * drafter.shape.hidden
    feats, tokens = torch.randn(rows, longest, width), torch.randint(drafter.vocab.target_size, (rows, longest))
    drafter.reset(rows + 1, longest + STEPS)  # a row more than are in use
    state = drafter.admit(0, tokens[:, 0], feats, tokens, torch.tensor(LENS))
    found = chain(drafter, state, STEPS, LIKELIEST)
    return *found, drafter.cache.memory


@torch.inference_mode()
@pytest.mark.parametrize("draft_vocab", [None, 7])
@pytest.mark.parametrize("kind", KINDS)
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
