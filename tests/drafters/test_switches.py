"""What a switch of a drafter's forward does, against a formula written out."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import tiny_drafter, tiny_target

from specdec.drafters.conditional import Domino
from specdec.drafters.eagle3 import Eagle3Forward
from specdec.drafters.formats.dflash import conditional_of
from specdec.drafters.vocab import DraftVocab


def test_the_blank_first_embedding_is_that_of_position_0_alone():
    drafter = tiny_drafter(tiny_target(), kind="mtp")
    tokens, positions = torch.tensor([[3, 5, 7]]), torch.tensor([[0, 1, 2]])
    plain = drafter.embed(tokens, positions)
    drafter.switches = drafter.switches.__class__(blank_first=True)
    blank = drafter.embed(tokens, positions)
    assert not blank[:, 0].any()
    assert torch.equal(blank[:, 1:], plain[:, 1:])
    assert plain.abs().sum(-1).all()


@pytest.mark.parametrize("residual_norm", [False, True])
def test_the_residual_is_the_hidden_state_before_or_after_its_norm(residual_norm):
    drafter = tiny_drafter(tiny_target())
    drafter.switches = Eagle3Forward(residual_norm=residual_norm)
    embeds, hidden = torch.randn(2, 1, 4, drafter.shape.hidden, generator=torch.Generator().manual_seed(0))
    seen = {}

    def add(residual, x, norm, rope, attend):
        seen["residual"] = residual
        return residual, norm(residual)

    drafter.attention.add = add
    drafter.layer(embeds, hidden, None, None, 0)
    expected = drafter.hidden_norm(hidden) if residual_norm else hidden
    torch.testing.assert_close(seen["residual"], expected)


def test_domino_keeps_the_base_logits_of_its_first_slots_and_narrows_by_silu():
    torch.manual_seed(0)
    head = Domino(DraftVocab(12), torch.randn(12, 8), rank=4, state=6)
    assert head.prefix == 1
    hidden, carried = torch.randn(1, 1, 8), torch.randn(1, 3, 6)
    first, _ = head.narrow(hidden, carried, 0)
    assert not first.any()
    narrow, _ = head.narrow(hidden, carried, 1)
    x = torch.cat([hidden.expand(1, 3, 8), carried], -1) @ head.down.weight.T
    torch.testing.assert_close(narrow, x * x.sigmoid())
    assert not torch.allclose(narrow, F.gelu(x), atol=1e-3)


def test_a_domino_checkpoint_without_a_prefix_keeps_the_first_slot():
    """As SpecForge's `pure_draft_prefix_len` does where config.json leaves it out."""
    tensors = {"embed_proj.0.weight": torch.zeros(4, 14)}
    found = conditional_of({}, SimpleNamespace(hidden=8), tensors, "x")
    assert found == {"conditional": "domino", "rank": 4, "head": {"state": 6, "prefix": 1}}
