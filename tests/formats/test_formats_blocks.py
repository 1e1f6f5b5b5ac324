"""The layouts of block drafters: read, written and read again."""

import dataclasses
import json

import pytest
import torch
from golden_blocks import GOLDEN, golden_drafter, golden_heads, golden_target
from safetensors.torch import load_file, save_file

from specdec.drafters.dflash import create
from specdec.drafters.formats import (
    dflash,
    dflash_layout,
    load_drafter,
    open_checkpoint,
)
from specdec.drafters.formats.base import facts_of
from specdec.drafters.formats.convert import export
from specdec.drafters.vocab import DraftVocab
from specdec.model.checkpoint import write_folder


@pytest.fixture(scope="module")
def target():
    return golden_target(load_file(GOLDEN / "dflash_model.safetensors"))


def drafter_of(name: str):
    heads = golden_heads(load_file(GOLDEN / "dspark.safetensors"), "vanilla") if name == "dspark" else None
    return golden_drafter(name, extra=heads)


@pytest.mark.parametrize("sign", ["layer_fusion_weights", "hidden_correction.gate_proj.weight", {"model_arch": "dfly"}])
def test_fusions_of_angelspec_are_refused(sign):
    """DFlare and DFly."""
    extra, fields = ({sign: torch.zeros(2, 3)}, {}) if isinstance(sign, str) else ({}, sign)
    with pytest.raises(ValueError, match="dflash: DFlare and DFly drafters are not supported; supported are DFlash, "):
        golden_drafter("dflash", extra=extra, **fields)


def test_a_part_of_the_vocabulary(target, tmp_path):
    """The layout of speculators has the map, and a head of its own; the others refuse it."""
    meaning, tensors = dflash.FAMILY.dismantle(drafter_of("speculators"), target)
    ids = torch.arange(96) * 3
    tensors |= {"d2t": ids - torch.arange(96), "lm_head.weight": torch.randn(96, 64)}
    meaning = dataclasses.replace(meaning, draft_vocab=96)
    config, spelled = dflash_layout.SPECULATORS.write(meaning, tensors, facts_of(target))
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(spelled, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.meaning == meaning
    drafter = load_drafter(tmp_path, target)
    assert torch.equal(drafter.vocab.ids, ids)
    assert torch.equal(drafter.head.weight, tensors["lm_head.weight"])
    for layout in (dflash_layout.ZLAB, dflash_layout.DEEPSPEC):
        with pytest.raises(ValueError, match="no part of a vocabulary"):
            layout.write(meaning, tensors, facts_of(target))


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
    "rnn": ({}, "it knows no markov_rnn", "it knows no markov_rnn"),
    "taps": ({}, "vLLM gathers taps in ascending order", "SGLang gathers taps in ascending order"),
    "last": ({}, "vLLM has only as it is before the final norm", "SGLang does not give"),
}  # fmt: skip


@pytest.mark.parametrize("server", ["vllm", "sglang"])
@pytest.mark.parametrize("name", SERVED)
def test_servers_get_what_they_read(name, server, target, tmp_path):
    """What is exported reads back as what it was."""
    changes, *said = SERVED[name]
    meaning, tensors = dflash.FAMILY.dismantle(drafter_of("dspark" if name == "dspark" else "dflash"), target)
    meaning = dataclasses.replace(meaning, forward=dataclasses.replace(meaning.forward, **changes))
    if name in ("rnn", "domino"):
        head = {"rnn": "markov_rnn", "domino": "domino"}[name]
        made = create(target, layers=2, taps=meaning.taps, block_size=6, label="p+k+1", conditional=head, rank=16)
        meaning, tensors = dflash.FAMILY.dismantle(made, target)
    elif name in ("taps", "last"):
        meaning = dataclasses.replace(meaning, taps={"taps": (6, 2, 10), "last": (2, 6, 12)}[name])
    usual = dflash_layout.SPECULATORS if "anchor" in name else dflash_layout.ZLAB
    write_folder(tmp_path / "it", *usual.write(meaning, tensors, facts_of(target)))
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(json.dumps({"num_hidden_layers": 12}))
    ends = {"model.embed_tokens.weight": target.embed.weight, "lm_head.weight": target.head.weight}
    save_file({key: tensor.data for key, tensor in ends.items()}, tmp_path / "target" / "model.safetensors")
    problem = said[server == "sglang"]
    if problem is not None:
        with pytest.raises(ValueError, match=problem):
            export(tmp_path / "it", tmp_path / "out", server, tmp_path / "target")
        return
    export(tmp_path / "it", tmp_path / "out", server, tmp_path / "target")
    assert open_checkpoint(tmp_path / "out").meaning == meaning
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.get("is_causal") == (True if name == "jetspec" else None)


def test_a_part_of_the_vocabulary_in_vllm(target):
    """In the layout of speculators, of which vLLM would make all layers causal unless windows are said not to be."""
    drafter = create(target, layers=2, taps=(2, 6, 10), block_size=4, vocab=DraftVocab(320, torch.arange(96) * 3))
    config, tensors = dflash_layout.write_vllm(*dflash.FAMILY.dismantle(drafter, target), facts_of(target))
    assert config["speculators_model_type"] == "dflash"
    assert config["sliding_window_non_causal"]
    assert {"d2t", "t2d", "lm_head.weight"} <= set(tensors)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dflash_config": {"mask_token_id": 318}}, "target_layer_ids must be a list"),
        ({"dflash_config": {"mask_token_id": 320, "target_layer_ids": [1, 5, 9]}}, "embedding has 320 rows"),
        ({"dflash_config": {"target_layer_ids": [1, 5, 9]}}, "lacks the number mask_token_id"),
        ({"dflash_config": {"projector_type": "lilicorr"}}, "kind lilicorr are not supported"),
        ({"block_size": 1}, "drafts nothing"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "window of at least 1"),
        ({"vocab_size": 300}, "vocabulary of 300"),
    ],
)
def test_what_cannot_be_read(changes, message):
    with pytest.raises(ValueError, match=message):
        golden_drafter("dflash", **changes)
