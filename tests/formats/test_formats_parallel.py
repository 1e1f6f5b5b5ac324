"""The layouts of P-EAGLE and PARD: read, written and read again."""

import dataclasses
import json

import pytest
import torch
from golden_blocks import GOLDEN, golden_drafter, golden_target
from helpers import assert_close_in_fp32, save_hf, tiny_parallel, tiny_target
from safetensors.torch import load_file

from specdec.drafters import pard as pard_drafter
from specdec.drafters.draft_model import DraftModel
from specdec.drafters.formats import family_of, load_drafter, pard, peagle, save_drafter
from specdec.drafters.formats.base import facts_of
from specdec.drafters.formats.convert import convert, export
from specdec.drafters.formats.description import inspect
from specdec.drafters.pard import Pard
from specdec.model.loader import load_target


@pytest.fixture(scope="module")
def target():
    held = load_file(GOLDEN / "peagle_model.safetensors")
    return golden_target(held | {"lm_head.weight": torch.zeros(320, 64)})


@pytest.mark.parametrize(("source", "block"), [("peagle", 8), ("peagle_speculators", 4)])
def test_peagle_is_read(source, block):
    """SpecForge's config states no number of tokens, and no taps."""
    drafter = golden_drafter(source, "peagle")
    assert family_of(drafter) is peagle.FAMILY
    assert (drafter.block, drafter.taps, len(drafter.upper)) == (block, (2, 6, 9), 2)


def test_taps_in_another_order_take_mask_hidden_with_them(target):
    """Servers gather taps in ascending order: `fc` and `mask_hidden` follow, and the drafts stay what they are."""
    drafter = golden_drafter("peagle_speculators", "peagle")
    drafter.taps = (9, 2, 6)
    config, spelled = peagle.SPECULATORS.write(*peagle.FAMILY.dismantle(drafter, target), facts_of(target))
    again = peagle.FAMILY.construct(*peagle.SPECULATORS.read(config, spelled, "it"), target, "it")
    assert again.taps == (2, 6, 9)
    feats, tokens = torch.randn(1, 5, 192), torch.randint(320, (1, 5))
    first, second, third = feats.chunk(3, -1)
    for ours, theirs in zip(
        drafter.unroll(feats, tokens, 4), again.unroll(torch.cat([second, third, first], -1), tokens, 4), strict=True
    ):
        assert_close_in_fp32(ours.logits, theirs.logits)


def test_an_embedding_that_is_not_there_is_the_targets(target):
    drafter = golden_drafter("peagle", "peagle")
    meaning, tensors = peagle.FAMILY.dismantle(drafter, target)
    del tensors["embed_tokens.weight"]
    shared = peagle.FAMILY.construct(dataclasses.replace(meaning, embeds=False), tensors, target, "it")
    assert torch.equal(shared.embedding, target.embed.weight)


def test_pard2_keeps_its_projection_in_a_pickle(tmp_path):
    """Where the authors' loop looks for it, and nowhere else."""
    target = tiny_target()
    drafter = tiny_parallel(target, "pard2")
    save_drafter(drafter, tmp_path / "it", target)
    assert "6 tokens, by mask token 16" in load_drafter(tmp_path / "it", target).conventions["block"]
    pickled = tmp_path / "it" / "warp_model.bin"
    assert torch.equal(torch.load(pickled)["target_proj.weight"], drafter.target_proj.weight)
    assert "target_proj.weight" not in load_file(tmp_path / "it" / "model.safetensors")
    torch.save({"target_proj.weight": torch.full((32, 64), torch.nan)}, pickled)
    with pytest.raises(ValueError, match=r"target_proj\.weight holds 2048 NaN"):
        load_drafter(tmp_path / "it", target)
    assert any("target_proj" in problem for problem in inspect(tmp_path / "it")["problems"])
    pickled.unlink()
    with pytest.raises(ValueError, match=r"lacks the tensor target_proj\.weight"):
        load_drafter(tmp_path / "it", target)


def test_a_pard_folder_is_a_language_model_for_others(tmp_path):
    """Its authors' folder: what transformers loads, with a mask token in the config, by which we know it."""
    save_hf(tmp_path / "it", "qwen3", head_dim=8, tie_word_embeddings=True)
    target = load_target(tmp_path / "it", tokenizer=False)
    assert isinstance(load_drafter(tmp_path / "it", target), DraftModel)
    config = json.loads((tmp_path / "it" / "config.json").read_text())
    (tmp_path / "it" / "config.json").write_text(json.dumps(config | {"spd_type": "pard", "pard_token": 98}))
    with pytest.warns(UserWarning, match="how many tokens it has learnt to draft is not stated: 8 are taken"):
        drafter = load_drafter(tmp_path / "it", target)
    assert isinstance(drafter, Pard)
    assert (drafter.block, drafter.switches.mask_token) == (8, 98)
    convert(tmp_path / "it", tmp_path / "ours", "pard")
    assert load_drafter(tmp_path / "ours", target).block == 8
    again = load_target(tmp_path / "ours", tokenizer=False)
    assert torch.equal(again.blocks[0].mlp.down.weight, target.blocks[0].mlp.down.weight)


@pytest.mark.parametrize(
    ("kind", "server", "message"),
    [
        ("peagle", "sglang", "not P-EAGLE"),
        ("peagle-speculators", "vllm", "knows no norm for each tap"),
        ("pard", "sglang", "not PARD"),
        ("pard2", "vllm", "and not with PARD-2"),
    ],
)
def test_servers_that_cannot(kind, server, message, tmp_path):
    target = tiny_target()
    save_drafter(tiny_parallel(target, kind), tmp_path / "it", target)
    with pytest.raises(ValueError, match=message):
        export(tmp_path / "it", tmp_path / "out", server, tmp_path)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("peagle", {"mask_token_id": None}, "lacks the number mask_token_id"),
        ("peagle", {"mask_token_id": 320}, "the embedding has 320 rows"),
        ("peagle", {"block_size": 1}, "a block has 2 at least"),
        ("peagle", {"vocab_size": 300}, "the drafter is for a vocabulary of 300, the target's is 320"),
        ("pard", {"pard_token": None}, "lacks the number pard_token"),
        ("pard", {"pard_token": 320}, "the embedding has 320 rows"),
        ("pard", {"spd_type": "pard2"}, "pard2_target_layers must be a list"),
        ("pard", {"spd_type": "pard2", "pard2_target_layers": [1]}, "must count from the end"),
        ("pard", {"spd_type": "pard2", "pard2_target_layers": [-1], "pard2_target_dim": 32}, "reads 32 features"),
        ("pard", {"model_type": "mamba"}, "models of our own decoder only"),
    ],
)
def test_what_cannot_be_read(name, changes, message):
    with pytest.raises(ValueError, match=message):
        golden_drafter(name, name, **changes)


def test_a_part_of_the_vocabulary_has_no_layout_of_pard():
    target = tiny_target()
    drafter = pard_drafter.create(target, vocab=tiny_parallel(target, "peagle").vocab, layers=1)
    with pytest.raises(ValueError, match=r"drafter\.draft_vocab_size=null"):
        pard.FAMILY.dismantle(drafter, target)
