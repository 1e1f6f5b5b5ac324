"""scripts/grow.py: a wider target has the logits of the smaller one, and all of it learns."""

import pytest
import torch
from helpers import SMALL, tiny_drafter
from transformers import LlamaConfig, LlamaForCausalLM

from scripts.grow import grow, grow_drafter, grown_config, narrowed
from specdec.api import load_drafter, load_target
from specdec.drafters.formats import save_drafter


@pytest.fixture
def small():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMALL, head_dim=8, tie_word_embeddings=True, rms_norm_eps=1e-12))
    with torch.no_grad():
        for name, weight in model.named_parameters():  # norms too, so that none is forgotten
            weight.copy_(torch.rand_like(weight) + 0.5 if "norm" in name else torch.randn_like(weight) * 0.2)
    return model


def test_a_wider_target_has_the_same_logits(small):
    wide = grow(small, grown_config(small.config, 96, 100))
    ids = torch.randint(small.config.vocab_size, (2, 20))
    with torch.no_grad():
        torch.testing.assert_close(wide(ids).logits, small(ids).logits, atol=1e-4, rtol=1e-4)
    assert sum(p.numel() for p in wide.parameters()) > 2 * sum(p.numel() for p in small.parameters())
    assert wide.config.num_attention_heads == 12
    assert wide.config.num_key_value_heads == 4


def test_all_of_it_learns(small):
    """Of two steps, since what is 0 at first hides what stands before it."""
    wide = grow(small, grown_config(small.config, 96, 100))
    before = {name: weight.clone() for name, weight in wide.named_parameters()}
    optimizer = torch.optim.SGD(wide.parameters(), lr=0.1)
    for _ in range(2):
        ids = torch.arange(small.config.vocab_size).view(1, -1)
        wide(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, weight in wide.named_parameters():
        assert (weight != before[name]).any(-1).all(), f"a row of {name} stayed what it was"


@pytest.mark.parametrize("sizes", [(100, 100), (40, 100), (96, 60)])
def test_a_size_that_does_not_fit_is_refused_by_name(small, sizes):
    with pytest.raises(ValueError, match=f"{sizes[0]} and {sizes[1]}"):
        grown_config(small.config, *sizes)


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "mtp", "medusa"])
@torch.no_grad()
def test_a_grown_drafter_drafts_the_same(small, kind, tmp_path):
    wide = grow(small, grown_config(small.config, 96, 100))
    small.save_pretrained(tmp_path / "small")
    wide.save_pretrained(tmp_path / "wide")
    target, larger = (load_target(tmp_path / name, tokenizer=False) for name in ("small", "wide"))
    drafter = tiny_drafter(target, kind=kind)
    save_drafter(drafter, tmp_path / "draft", target)
    grow_drafter(tmp_path / "draft", wide.config, tmp_path / "grown")
    grown = load_drafter(tmp_path / "grown", larger)
    tokens = torch.randint(small.config.vocab_size, (2, 12))
    steps = []
    for model, head in ((target, drafter), (larger, grown)):
        _, feats = model(tokens, None, taps=head.taps, logits=False)
        steps.append([state.logits for state in head.unroll(feats, tokens.roll(-1, 1), 3)])
    assert sum(p.numel() for p in grown.parameters()) > sum(p.numel() for p in drafter.parameters())
    for ours, theirs in zip(*steps, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)


def test_an_mlp_is_cut_to_its_largest_neurons():
    torch.manual_seed(0)
    weights = {f"mlp.{kind}_proj.weight": torch.randn(6, 4) for kind in ("gate", "up")}
    weights["mlp.down_proj.weight"] = torch.randn(4, 6)
    weights["mlp.down_proj.weight"][:, [1, 4]] = 0
    cut = narrowed(weights, 4)
    for name, weight in cut.items():
        assert torch.equal(weight, weights[name][:, [0, 2, 3, 5]] if "down" in name else weights[name][[0, 2, 3, 5]])
