"""Drafters of blocks and of mask rows: what their layouts refuse, and what servers get."""

import dataclasses
import json

import pytest
import torch
from golden_blocks import GOLDEN, golden_drafter, golden_heads, golden_parallel, golden_target
from helpers import assert_close_in_fp32, save_hf, tiny_parallel, tiny_target
from safetensors.torch import load_file

from specdec.drafters import pard as pard_drafter
from specdec.drafters.dflash import create
from specdec.drafters.draft_model import DraftModel
from specdec.drafters.formats import (
    block_servers,
    dflash,
    dflash_layout,
    load_drafter,
    open_checkpoint,
    pard,
    peagle,
    save_drafter,
)
from specdec.drafters.formats.base import facts_of
from specdec.drafters.formats.convert import convert, export
from specdec.drafters.formats.description import inspect
from specdec.drafters.pard import Pard
from specdec.drafters.vocab import DraftVocab
from specdec.model.checkpoint import write_folder
from specdec.model.loader import load_target

SLIDING = ["full_attention", "sliding_attention"]


@pytest.fixture(scope="module")
def target():
    return golden_target(load_file(GOLDEN / "dflash_model.safetensors"))


@pytest.mark.parametrize("sign", ["layer_fusion_weights", "hidden_correction.gate_proj.weight", {"model_arch": "dfly"}])
def test_fusions_of_angelspec_are_refused(sign):
    """DFlare and DFly."""
    extra, fields = ({sign: torch.zeros(2, 3)}, {}) if isinstance(sign, str) else ({}, sign)
    with pytest.raises(ValueError, match="dflash: DFlare and DFly drafters are not supported; supported are DFlash, "):
        golden_drafter("dflash", extra=extra, **fields)


def test_a_part_of_the_vocabulary(target, tmp_path):
    """The layout of speculators has the map, and a head of its own; the others refuse it. vLLM would make all its
    layers causal unless windows are said not to be."""
    ids = torch.arange(96) * 3
    drafter = create(target, layers=2, taps=(2, 6, 10), block_size=4, vocab=DraftVocab(320, ids))
    meaning, tensors = dflash.FAMILY.dismantle(drafter, target)
    tensors |= {"lm_head.weight": torch.randn(96, 64)}
    write_folder(tmp_path, *dflash_layout.SPECULATORS.write(meaning, tensors, facts_of(target)))
    assert open_checkpoint(tmp_path).meaning == meaning
    drafter = load_drafter(tmp_path, target)
    assert torch.equal(drafter.vocab.ids, ids)
    assert torch.equal(drafter.head.weight, tensors["lm_head.weight"])
    for layout in (dflash_layout.ZLAB, dflash_layout.DEEPSPEC):
        with pytest.raises(ValueError, match="no part of a vocabulary"):
            layout.write(meaning, tensors, facts_of(target))
    config, spelled = block_servers.write_vllm(meaning, tensors, facts_of(target))
    assert config["speculators_model_type"] == "dflash"
    assert config["sliding_window_non_causal"]
    assert {"d2t", "t2d", "lm_head.weight"} <= set(spelled)
    few = pard_drafter.create(tiny_target(), vocab=tiny_parallel(tiny_target(), "peagle").vocab, layers=1)
    with pytest.raises(ValueError, match=r"drafter\.draft_vocab_size=null"):
        pard.FAMILY.dismantle(few, target)


@pytest.mark.parametrize("name", ["dflash", "peagle"])
def test_misreadings_are_those_of_the_field(name, target):
    """The doctor tries the other alignment and what slots see, beside other taps; of P-EAGLE no other feedback."""
    if name == "dflash":
        family, drafter = dflash.FAMILY, golden_drafter("dflash")
    else:
        family, drafter = peagle.FAMILY, golden_parallel("peagle", "peagle")
    meaning, tensors = family.dismantle(drafter, target)
    readings = family.readings(meaning, tensors, target)
    names = {reading.name for reading in readings}
    assert ({"slot k tells token p+k+1", "a slot sees no later one"} <= names) == (name == "dflash")
    assert not any("feedback" in name for name in names)
    assert len(readings) >= (3 if name == "dflash" else 5)
    assert family.retap(meaning, (1, 5, 9)).taps == (1, 5, 9)
    for reading in readings:
        assert reading.meaning != meaning or any(reading.tensors[key] is not tensors[key] for key in tensors)
        family.construct(reading.meaning, reading.tensors, target, "it")


# What is changed in a drafter, and what each server says of it; None: it is exported.
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
    "taps": ({}, "vLLM gathers taps in ascending order", "SGLang gathers taps in ascending order"),
    "last": ({}, "vLLM has only as it is before the final norm", "SGLang does not give"),
}  # fmt: skip


@pytest.mark.parametrize("name", SERVED)
def test_servers_get_what_they_read(name, target, tmp_path):
    """What is exported reads back as what it was."""
    changes, *said = SERVED[name]
    extra = golden_heads(load_file(GOLDEN / "dspark.safetensors"), "vanilla") if name == "dspark" else None
    drafter = golden_drafter("dspark" if name == "dspark" else "dflash", extra=extra)
    if name in ("markov_rnn", "domino"):
        how = {"label": "p+k+1", "conditional": name, "rank": 16}
        drafter = create(target, layers=2, taps=drafter.taps, block_size=6, **how)
    meaning, tensors = dflash.FAMILY.dismantle(drafter, target)
    meaning = dataclasses.replace(meaning, forward=dataclasses.replace(meaning.forward, **changes))
    taps = {"taps": (6, 2, 10), "last": (2, 6, 12)}.get(name, meaning.taps)
    meaning = dataclasses.replace(meaning, taps=taps)
    usual = dflash_layout.SPECULATORS if "anchor" in name else dflash_layout.ZLAB
    write_folder(tmp_path / "it", *usual.write(meaning, tensors, facts_of(target)))
    ends = {"model.embed_tokens.weight": target.embed.weight.data, "lm_head.weight": target.head.weight.data}
    write_folder(tmp_path / "target", {"num_hidden_layers": 12}, ends)
    for server, problem in zip(("vllm", "sglang"), said, strict=True):
        if problem is not None:
            with pytest.raises(ValueError, match=problem):
                export(tmp_path / "it", tmp_path / server, server, tmp_path / "target")
            continue
        export(tmp_path / "it", tmp_path / server, server, tmp_path / "target")
        assert open_checkpoint(tmp_path / server).meaning == meaning
        config = json.loads((tmp_path / server / "config.json").read_text())
        assert config.get("is_causal") == (True if name == "jetspec" else None)


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


PARD2 = {"spd_type": "pard2"}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("dflash", {"dflash_config": {"mask_token_id": 318}}, "target_layer_ids must be a list"),
        ("dflash", {"dflash_config": {"mask_token_id": 320, "target_layer_ids": [1, 5, 9]}}, "embedding has 320 rows"),
        ("dflash", {"dflash_config": {"target_layer_ids": [1, 5, 9]}}, "lacks the number mask_token_id"),
        ("dflash", {"dflash_config": {"projector_type": "lilicorr"}}, "kind lilicorr are not supported"),
        ("dflash", {"block_size": 1}, "drafts nothing"),
        ("dflash", {"layer_types": SLIDING}, "window of at least 1"),
        ("dflash", {"vocab_size": 300}, "vocabulary of 300"),
        ("peagle", {"mask_token_id": None}, "lacks the number mask_token_id"),
        ("peagle", {"mask_token_id": 320}, "the embedding has 320 rows"),
        ("peagle", {"block_size": 1}, "a block has 2 at least"),
        ("peagle", {"vocab_size": 300}, "t2d speaks of 320 tokens, the target has 300"),
        ("pard", {"pard_token": None}, "lacks the number pard_token"),
        ("pard", {"pard_token": 320}, "the embedding has 320 rows"),
        ("pard", PARD2, "pard2_target_layers must be a list"),
        ("pard", PARD2 | {"pard2_target_layers": [1]}, "must count from the end"),
        ("pard", PARD2 | {"pard2_target_layers": [-1], "pard2_target_dim": 32}, "reads 32 features"),
        ("pard", {"model_type": "mamba"}, "models of our own decoder only"),
    ],
)
def test_what_cannot_be_read(name, changes, message):
    with pytest.raises(ValueError, match=message):
        golden_drafter(name, **changes) if name == "dflash" else golden_parallel(name, name, **changes)


def test_taps_in_another_order_take_mask_hidden_with_them(target):
    """Servers gather taps in ascending order: `fc` and `mask_hidden` follow, and the drafts stay what they are."""
    drafter = golden_parallel("peagle_speculators", "peagle")
    assert (drafter.block, len(drafter.upper), drafter.taps) == (4, 2, (2, 6, 9))
    drafter.taps = (9, 2, 6)
    config, spelled = peagle.SPECULATORS.write(*peagle.FAMILY.dismantle(drafter, target), facts_of(target))
    again = peagle.FAMILY.construct(*peagle.SPECULATORS.read(config, spelled, "it"), target, "it")
    assert again.taps == (2, 6, 9)
    feats, tokens = torch.randn(1, 5, 192), torch.randint(320, (1, 5))
    first, second, third = feats.chunk(3, -1)
    moved = again.unroll(torch.cat([second, third, first], -1), tokens, 4)
    for ours, theirs in zip(drafter.unroll(feats, tokens, 4), moved, strict=True):
        assert_close_in_fp32(ours.logits, theirs.logits)


def test_an_embedding_that_is_not_there_is_the_targets(target):
    meaning, tensors = peagle.FAMILY.dismantle(golden_parallel("peagle", "peagle"), target)
    del tensors["embed_tokens.weight"]
    shared = peagle.FAMILY.construct(dataclasses.replace(meaning, embeds=False), tensors, target, "it")
    assert torch.equal(shared.embedding, target.embed.weight)
    assert shared.block == 8


def test_the_projection_of_pard2_is_a_pickle_where_its_authors_look_for_it(tmp_path):
    target, pickled = tiny_target(), tmp_path / "it" / "warp_model.bin"
    drafter = tiny_parallel(target, "pard2")
    save_drafter(drafter, tmp_path / "it", target)
    assert "6 tokens, by mask token 16" in load_drafter(tmp_path / "it", target).conventions["block"]
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
