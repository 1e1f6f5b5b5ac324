"""Filters and children at the ends of their ranges, against formulas written out."""

import pytest
import torch

from specdec.children import Coupled
from specdec.drafters.vocab import DraftVocab
from specdec.sampling.filters import filtered_probs, settings_of
from specdec.sampling.noise import Noise, bits_of, gumbel, hashes_of
from specdec.structs import Sampling


@pytest.mark.parametrize("top_p", [1e-38, 1e-9, 1e-3])
@pytest.mark.parametrize("mixed", [False, True])
def test_a_tiny_top_p_keeps_the_likeliest_token(top_p, mixed):
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    samplings = [Sampling(0.9, top_p=top_p), Sampling(0.7 if mixed else 0.9, top_p=top_p)]
    probs = filtered_probs(logits, settings_of(samplings, logits.device))
    assert torch.equal(probs, torch.nn.functional.one_hot(logits.argmax(-1), 50).float())


@pytest.mark.parametrize("trust", [0.5, 1.0])
def test_coupled_children_trust_the_drafter_as_far_as_it_says(trust):
    """log softmax of trust * logits / temperature + the target's own noise (`Coupled`)."""
    hashes = hashes_of(torch.arange(20))
    noise = Noise([(1, 2)], hashes).after(torch.tensor([4]), 3)
    logits = torch.randn(1, 3, 20, generator=torch.Generator().manual_seed(1))
    scores = Coupled(noise, Sampling(0.8), trust).scores(logits, DraftVocab(20), slice(0, 3))
    expected = (trust * logits / 0.8 + gumbel(bits_of(noise.keys, hashes))).log_softmax(-1)
    torch.testing.assert_close(scores, expected)
