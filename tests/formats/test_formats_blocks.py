"""The layouts of block drafters: read, written and read again."""

import dataclasses
import json
import warnings

import pytest
import torch
from golden_blocks import GOLDEN, golden_drafter, golden_heads, golden_target
from safetensors.torch import load_file, save_file

from drafters.dflash import create
from drafters.formats import FAMILIES, dflash_layout, family_of, load_drafter, open_checkpoint, save_drafter
from drafters.formats.base import facts_of

SLIDING = ["full_attention", "sliding_attention"]
# Name -> the config, and what is changed in it, and whether it has DSpark's heads.
CASES = {
    "dflash": ("dflash", {}, False),
    "windows": ("dflash", {"layer_types": SLIDING, "sliding_window": 5, "is_causal": False}, False),
    "deepspec": ("deepspec", {}, False),
    "dspark": ("dspark", {}, True),
    "speculators": ("speculators", {}, False),
    "dflash2": ("dflash2", {}, False),
    "speculators dflash2": ("dflash2_speculators", {}, False),
    "speculators dspark": ("dspark_speculators", {}, True),
}


@pytest.fixture(scope="module")
def target():
    return golden_target(load_file(GOLDEN / "dflash_model.safetensors"))


def drafter_of(case: str):
    name, changes, heads = CASES[case]
    if "dflash2" in case:
        return golden_drafter(name, "dflash2", **changes)
    extra = golden_heads(load_file(GOLDEN / "dspark.safetensors"), "vanilla") if heads else None
    return golden_drafter(name, extra=extra, **changes)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", FAMILIES[dflash_layout.FAMILY], ids=lambda layout: layout.name)
def test_what_is_written_is_read_again(case, layout, target):
    """In every layout that can say it, to the last bit; the others say why they cannot."""
    drafter = drafter_of(case)
    family = family_of(drafter)
    assert family is dflash_layout.FAMILY
    meaning, tensors = family.dismantle(drafter, target)
    windows = any(meaning.forward.sliding)
    shifted = meaning.forward.label == "p+k+1"
    if (layout.name == "deepspec" and not shifted) or (windows and layout.name != "dflash"):
        with pytest.raises(ValueError, match="this layout"):
            layout.write(meaning, tensors, facts_of(target))
        return
    config, spelled = layout.write(meaning, tensors, facts_of(target))
    config = json.loads(json.dumps(config))
    assert layout.recognise(config, spelled)
    again, back = layout.read(config, spelled, "it")
    assert again == meaning
    assert set(back) == set(tensors) == set(family.expected(again, back))
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())
    assert family.describe(again, back)["alignment"].startswith(f"slot k tells token {meaning.forward.label},")


def test_a_folder_is_saved_and_loaded(target, tmp_path):
    drafter = drafter_of("dspark")
    save_drafter(drafter, tmp_path / "it", target)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = load_drafter(tmp_path / "it", target)
    assert loaded.switches == drafter.switches
    assert "slot k tells token p+k+1" in loaded.conventions["alignment"]
    for (name, ours), theirs in zip(drafter.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("switches", [{"fusion": "layer"}, {"fusion": "both", "conditional": "correction", "rank": 6}])
def test_other_fusions_are_saved_and_loaded(target, tmp_path, switches):
    drafter = create(target, layers=2, taps=3, block_size=5, **switches)
    with torch.no_grad():
        drafter.mix.add_(torch.randn_like(drafter.mix))
    save_drafter(drafter, tmp_path / "it", target)
    loaded = load_drafter(tmp_path / "it", target)
    assert (loaded.switches.fusion, loaded.block) == (switches["fusion"], 4)
    for (name, ours), theirs in zip(drafter.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    meaning, tensors = dflash_layout.FAMILY.dismantle(drafter, target)
    for layout in (dflash_layout.DEEPSPEC, dflash_layout.SPECULATORS):
        with pytest.raises(ValueError, match="take the layout dflash"):
            layout.write(meaning, tensors, facts_of(target))


def test_a_part_of_the_vocabulary(target, tmp_path):
    """The layout of speculators has the map, and a head of its own; the others refuse it."""
    meaning, tensors = dflash_layout.FAMILY.dismantle(drafter_of("speculators"), target)
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


def test_misreadings_are_those_of_the_field(target):
    """The doctor tries the other alignment and what slots see, beside other taps."""
    family = dflash_layout.FAMILY
    meaning, tensors = family.dismantle(drafter_of("dflash"), target)
    names = [reading.name for reading in family.readings(meaning, tensors, target)]
    assert {"slot k tells token p+k+1", "a slot sees no later one"} <= set(names)
    assert family.retap(meaning, (1, 5, 9)).taps == (1, 5, 9)
    for reading in family.readings(meaning, tensors, target):
        assert reading.meaning != meaning
        family.construct(reading.meaning, reading.tensors, target, "it")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dflash_config": {"mask_token_id": 318}}, "target_layer_ids must be a list"),
        ({"dflash_config": {"mask_token_id": 320, "target_layer_ids": [1, 5, 9]}}, "embedding has 320 rows"),
        ({"dflash_config": {"target_layer_ids": [1, 5, 9]}}, "lacks the number mask_token_id"),
        ({"dflash_config": {"projector_type": "lilicorr"}}, "kind lilicorr are not supported"),
        ({"block_size": 1}, "drafts nothing"),
        ({"layer_types": SLIDING}, "window of at least 1"),
        ({"vocab_size": 300}, "vocabulary of 300"),
    ],
)
def test_what_cannot_be_read(changes, message):
    with pytest.raises(ValueError, match=message):
        golden_drafter("dflash", **changes)
