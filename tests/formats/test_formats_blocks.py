"""The layouts of block drafters, P-EAGLE and PARD: read, written and read again."""

import dataclasses
import json
import re
from contextlib import nullcontext

import pytest
import torch
from golden_blocks import GOLDEN, golden_drafter, golden_heads, golden_target
from helpers import assert_close_in_fp32, edit_config, save_hf, tiny_parallel, tiny_target
from published import written
from safetensors.torch import load_file

from specdec.drafters import formats
from specdec.drafters import pard as pard_drafter
from specdec.drafters import peagle as peagle_drafter
from specdec.drafters.dflash import create
from specdec.drafters.draft_model import DraftModel
from specdec.drafters.formats import dflash, dflash_layout, load_drafter, open_checkpoint, pard, peagle, save_drafter
from specdec.drafters.formats.base import facts_of
from specdec.drafters.formats.convert import convert, export
from specdec.drafters.formats.description import inspect
from specdec.drafters.pard import Pard
from specdec.drafters.vocab import DraftVocab
from specdec.model.checkpoint import write_folder
from specdec.model.loader import load_target


@pytest.fixture(scope="module")
def target():
    return golden_target(load_file(GOLDEN / "dflash_model.safetensors"))


def drafter_of(name: str):
    heads = golden_heads(load_file(GOLDEN / "dspark.safetensors"), "vanilla") if name == "dspark" else None
    return golden_drafter(name, extra=heads)


def test_a_part_of_the_vocabulary(target, tmp_path):
    """The file holds the map and no head: its rows are the target's. The layout of speculators gets a copy of them, the
    other published ones refuse it. vLLM would make all layers causal there, unless windows are said not to be."""
    some = DraftVocab(320, torch.arange(96) * 3)
    drafter = create(target, layers=2, taps=(2, 6, 10), block_size=4, vocab=some)
    parts = dflash.FAMILY.dismantle(drafter, target)
    save_drafter(drafter, tmp_path / "it", target)
    checkpoint, again = open_checkpoint(tmp_path / "it"), load_drafter(tmp_path / "it", target)
    own = dataclasses.replace(parts[0], own_head=True)
    assert (checkpoint.layout, checkpoint.meaning) == (dflash_layout.ZLAB, parts[0])
    assert "lm_head.weight" not in checkpoint.tensors
    assert torch.equal(again.vocab.ids, some.ids)
    assert torch.equal(again.head.weight, target.head.weight[some.ids])
    for write in (dflash_layout.write_deepspec, dflash_layout.write_sglang):
        with pytest.raises(ValueError, match=r"no part of a vocabulary|no form for a part"):
            write(*parts, facts_of(target))
    with pytest.raises(ValueError, match="the checkpoint has no head of its own, and this layout needs one: give"):
        dflash_layout.write_speculators(*parts, None)
    config, tensors = dflash_layout.write_vllm(*parts, facts_of(target))
    assert (config["speculators_model_type"], config["sliding_window_non_causal"]) == ("dflash", True)
    assert torch.equal(tensors["lm_head.weight"], target.head.weight[some.ids])
    write_folder(tmp_path / "copied", config, tensors)
    copied = open_checkpoint(tmp_path / "copied")
    assert (copied.layout, copied.meaning) == (dflash_layout.SPECULATORS, own)
    with pytest.raises(ValueError, match="no head of a drafter's own: take the layout speculators"):
        dflash_layout.write(copied.meaning, copied.tensors, facts_of(target))
    markov = dataclasses.replace(own, draft_vocab=own.vocab, conditional="markov")
    with pytest.raises(ValueError, match="no head of a drafter's own: take the layout speculators"):
        dflash_layout.write_deepspec(markov, copied.tensors, facts_of(target))


def test_where_windows_would_end_does_not_matter_without_windows(tmp_path):
    """DeepSpec's layout holds the embeddings and the head of a tied target too, which are one tensor there."""
    target = golden_target(load_file(GOLDEN / "dflash_model.safetensors"))
    target.head.weight = target.embed.weight
    drafter = create(target, layers=1, taps=(2, 6, 10), block_size=4, label="p+k+1", window_from="anchor")
    parts = dflash.FAMILY.dismantle(drafter, target)
    write_folder(tmp_path / "it", *dflash_layout.write_deepspec(*parts, facts_of(target)))
    assert torch.equal(load_file(tmp_path / "it" / "model.safetensors")["lm_head.weight"], target.embed.weight)
    save_drafter(drafter, tmp_path / "usual", target)
    assert open_checkpoint(tmp_path / "usual").layout is dflash_layout.ZLAB


@pytest.mark.parametrize("kind", [[], {}, 3, "other"])
def test_a_conditional_head_of_an_unknown_kind_is_refused(kind, target, tmp_path):
    config, tensors = dflash_layout.write(*dflash.FAMILY.dismantle(drafter_of("dspark"), target), facts_of(target))
    config["dflash_config"]["markov_head_type"] = kind
    write_folder(tmp_path / "it", config, tensors)
    message = f"it: markov_head_type must be one of vanilla, gated, rnn, got {re.escape(repr(kind))}"
    with pytest.raises(ValueError, match=message):
        open_checkpoint(tmp_path / "it")


# What is changed in a drafter, and the reason of each server; None: it is exported.
SERVED = {
    "dflash": ({}, None, None),
    "jetspec": ({"causal": True}, None, "SGLang knows no full layers"),
    "windows": ({"sliding": (False, True), "window": 5}, None, None),
    "windows before the anchor": (
        {"sliding": (False, True), "window": 5, "window_from": "anchor"}, "no windows before", "no windows before",
    ),
    "deepspec": ({"label": "p+k+1"}, "vLLM knows DFlash with slot k for token p", "SGLang knows DFlash with slot k"),
    "dspark": ({}, None, None),
    "domino": ({}, "vLLM would draft wrongly with this head: it knows no domino", None),
    "markov_rnn": ({}, "it knows no markov_rnn", "it knows no markov_rnn"),
    "taps out of order": (
        {"taps": (6, 2, 10)}, "vLLM gathers taps in ascending order", "SGLang gathers taps in ascending order"
    ),
    "last tap": ({"taps": (2, 6, 12)}, "vLLM has only as it is before the final norm", "SGLang does not give"),
}  # fmt: skip


@pytest.mark.parametrize("server", ["vllm", "sglang"])
@pytest.mark.parametrize("name", SERVED)
def test_servers_get_what_they_read(name, server, target, tmp_path):
    """What is exported reads back as what it was."""
    changes, *said = SERVED[name]
    drafter = drafter_of("dspark" if name == "dspark" else "dflash")
    if name in ("markov_rnn", "domino"):
        how = {"layers": 2, "block_size": 6, "label": "p+k+1", "rank": 16}
        drafter = create(target, taps=drafter.taps, conditional=name, **how)
    meaning, tensors = dflash.FAMILY.dismantle(drafter, target)
    if "tap" in name:
        meaning = dataclasses.replace(meaning, **changes)
    else:
        meaning = dataclasses.replace(meaning, forward=dataclasses.replace(meaning.forward, **changes))
    usual = dflash_layout.SPECULATORS if "anchor" in name else dflash_layout.ZLAB
    write_folder(tmp_path / "it", *usual.write(meaning, tensors, facts_of(target)))
    ends = {"model.embed_tokens.weight": target.embed.weight.data, "lm_head.weight": target.head.weight.data}
    written(tmp_path / "target", {"num_hidden_layers": 12}, ends)
    problem = said[server == "sglang"]
    with pytest.raises(ValueError, match=problem) if problem else nullcontext():
        export(tmp_path / "it", tmp_path / "out", server, tmp_path / "target")
    if problem:
        return
    assert open_checkpoint(tmp_path / "out").meaning == meaning
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.get("is_causal") == (True if name == "jetspec" else None)


# P-EAGLE and PARD


@pytest.fixture(scope="module")
def peagle_target():
    held = load_file(GOLDEN / "peagle_model.safetensors")
    return golden_target(held | {"lm_head.weight": torch.zeros(320, 64)})


@pytest.mark.parametrize(("source", "block"), [("peagle", 8), ("peagle_speculators", 4)])
def test_peagle_is_read(source, block):
    """SpecForge's config states no number of tokens, and no taps."""
    drafter = golden_drafter(source, "peagle")
    assert formats.family_of(drafter) is peagle.FAMILY
    assert (drafter.block, drafter.taps, len(drafter.upper)) == (block, (2, 6, 9), 2)


def test_taps_in_another_order_take_mask_hidden_with_them(peagle_target):
    """Servers gather taps in ascending order: `fc` and `mask_hidden` follow, and the drafts stay what they are."""
    drafter = golden_drafter("peagle_speculators", "peagle")
    drafter.taps = (9, 2, 6)
    parts = peagle.FAMILY.dismantle(drafter, peagle_target)
    config, spelled = peagle.SPECULATORS.write(*parts, facts_of(peagle_target))
    again = peagle.FAMILY.construct(*peagle.SPECULATORS.read(config, spelled, "it"), peagle_target, "it")
    assert again.taps == (2, 6, 9)
    feats, tokens = torch.randn(1, 5, 192), torch.randint(320, (1, 5))
    first, second, third = feats.chunk(3, -1)
    in_order = again.unroll(torch.cat([second, third, first], -1), tokens, 4)
    for ours, theirs in zip(drafter.unroll(feats, tokens, 4), in_order, strict=True):
        assert_close_in_fp32(ours.logits, theirs.logits)


def test_one_layer_with_biases_is_read_from_the_layout_of_speculators(peagle_target):
    made = peagle_drafter.create(peagle_target, taps=(2, 6, 9), layers=1, block_size=4)
    meaning, tensors = peagle.FAMILY.dismantle(made, peagle_target)
    meaning = dataclasses.replace(meaning, forward=dataclasses.replace(meaning.forward, qkv_bias=True))
    sizes = {x: len(tensors[f"midlayer.self_attn.{x}_proj.weight"]) for x in "qkv"}
    tensors |= {f"midlayer.self_attn.{x}_proj.bias": torch.randn(size) for x, size in sizes.items()}
    config, spelled = peagle.SPECULATORS.write(meaning, tensors, facts_of(peagle_target))
    again = peagle.FAMILY.construct(*peagle.SPECULATORS.read(config, spelled, "it"), peagle_target, "it")
    assert torch.equal(
        again.attention.qkv.bias, torch.cat([tensors[f"midlayer.self_attn.{x}_proj.bias"] for x in "qkv"])
    )


def test_an_embedding_that_is_not_there_is_the_targets(peagle_target):
    drafter = golden_drafter("peagle", "peagle")
    meaning, tensors = peagle.FAMILY.dismantle(drafter, peagle_target)
    del tensors["embed_tokens.weight"]
    shared = peagle.FAMILY.construct(dataclasses.replace(meaning, embeds=False), tensors, peagle_target, "it")
    assert torch.equal(shared.embedding, peagle_target.embed.weight)


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
    edit_config(tmp_path / "it", spd_type="pard", pard_token=98)
    with pytest.warns(UserWarning, match="how many tokens it has learnt to draft is not stated: 8 are taken"):
        drafter = load_drafter(tmp_path / "it", target)
    assert isinstance(drafter, Pard)
    assert (drafter.block, drafter.switches.mask_token) == (8, 98)
    convert(tmp_path / "it", tmp_path / "ours", "pard")
    assert load_drafter(tmp_path / "ours", target).block == 8
    again = load_target(tmp_path / "ours", tokenizer=False)
    assert torch.equal(again.blocks[0].mlp.down.weight, target.blocks[0].mlp.down.weight)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("dflash", {"dflash_config": {"mask_token_id": 318}}, "target_layer_ids must be a list"),
        ("dflash", {"dflash_config": {"mask_token_id": 320, "target_layer_ids": [1, 5, 9]}}, "embedding has 320 rows"),
        ("dflash", {"dflash_config": {"target_layer_ids": [1, 5, 9]}}, "lacks the number mask_token_id"),
        ("dflash", {"dflash_config": {"projector_type": "lilicorr"}}, "kind lilicorr are not supported"),
        ("dflash", {"block_size": 1}, "drafts nothing"),
        ("dflash", {"layer_types": ["full_attention", "sliding_attention"]}, "window of at least 1"),
        ("dflash", {"vocab_size": 300}, "vocabulary of 300"),
        ("dflash", {"extra": {"layer_fusion_weights": torch.zeros(2, 3)}}, "dflash: DFlare and DFly drafters are not"),
        ("dflash", {"extra": {"hidden_correction.gate_proj.weight": torch.zeros(2, 3)}}, "supported are DFlash, "),
        ("dflash", {"model_arch": "dfly"}, "DFlare and DFly drafters are not supported"),
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
