"""Every layout, by its published names and shapes: recognised, read strictly, converted to the others and back."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from golden_blocks import GOLDEN, golden_heads
from helpers import DRAFTERS, LEARNERS, PARALLEL, edit_config, edit_tensors, tiny_parallel, tiny_target
from published import CONFIG, LAYERS, PUBLISHED, H, V, make_target, publish, random_tensors, without, written
from safetensors.torch import load_file

from specdec.drafters import eagle as eagle_drafter
from specdec.drafters.formats import FAMILIES, load_drafter, open_checkpoint, recognise, save_drafter
from specdec.drafters.formats.base import TargetFacts
from specdec.drafters.formats.convert import SERVERS, convert, export
from specdec.drafters.formats.description import as_text, inspect
from specdec.drafters.formats.speculators import speculators_fields
from specdec.model.loader import load_target


@pytest.mark.parametrize("case", PUBLISHED)
def test_recognised_and_loaded_strictly(case, tmp_path):
    layout, _, shapes, _ = PUBLISHED[case]
    folder = publish(tmp_path / "it", case)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.layout.name == layout
    drafter = load_drafter(folder, make_target())
    assert drafter.conventions == checkpoint.conventions() == open_checkpoint(folder, headers=True).conventions()
    parameters = sum(p.numel() for p in drafter.parameters())
    held = sum(torch.Size(shape).numel() for name, shape in shapes.items() if name != "embed_tokens.weight")
    assert parameters == held  # every weight has found its place
    report = inspect(folder)
    assert report["problems"] == []
    assert "none found" in as_text(report)


@pytest.mark.parametrize("case", PUBLISHED)
def test_a_tensor_of_another_name_is_an_error(case):
    _, config, shapes, maps = PUBLISHED[case]
    target = make_target()
    for name in without(shapes, "embed_tokens.weight"):
        tensors = random_tensors(shapes, maps)
        tensors[name + "s"] = tensors.pop(name)
        with pytest.raises(ValueError, match=r"lacks|holds|sets|known layout"):
            load_from(config, tensors, target)


def load_from(config: dict, tensors: dict, target):
    family, layout = recognise(config, tensors, "it")
    return family.construct(*layout.read(config, tensors, "it"), target, "it")


# Conversions

WINDOWS = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5, "is_causal": False}
# Name -> the weights in tests/golden/blocks, the config there, changes of it, and whether DSpark's heads are added.
GOLDEN_CASES = {
    "dflash": ("dflash", "dflash", {}, False),
    "dflash, windows": ("dflash", "dflash", WINDOWS, False),
    "deepspec": ("dflash", "deepspec", {}, False),
    "dspark": ("dflash", "dspark", {}, True),
    "dflash of speculators": ("dflash", "speculators", {}, False),
    "dflash2": ("dflash2", "dflash2", {}, False),
    "dflash2 of speculators": ("dflash2", "dflash2_speculators", {}, False),
    "dspark of speculators": ("dflash", "dspark_speculators", {}, True),
    "peagle": ("peagle", "peagle", {}, False),
    "peagle of speculators": ("peagle", "peagle_speculators", {}, False),
}


def source_of(case: str, folder: Path) -> tuple[Path, Path]:
    """The folder of a case as published, and that of its target."""
    if case in PUBLISHED:
        fields = CONFIG | {"model_type": "llama", "num_hidden_layers": LAYERS, "architectures": ["LlamaForCausalLM"]}
        head = torch.randn(V, H, generator=torch.Generator().manual_seed(3))
        target = written(folder / "target", fields, {"model.embed_tokens.weight": head})
        return publish(folder / "source", case), target
    model, config, changes, heads = GOLDEN_CASES[case]
    tensors = load_file(GOLDEN / f"{model}_model.safetensors")
    ends = {"model.embed_tokens.weight": tensors["embed_tokens.weight"], "lm_head.weight": torch.ones(320, 64)}
    target = written(folder / "target", {"num_hidden_layers": 12}, ends)
    if heads:
        tensors |= golden_heads(load_file(GOLDEN / "dspark.safetensors"), "vanilla")
    if model != "peagle":  # copies of the target's, which only DeepSpec's files hold
        tensors = without(tensors, "embed_tokens.weight", "lm_head.weight")
    return written(folder / "source", json.loads((GOLDEN / f"{config}.json").read_text()) | changes, tensors), target


def conversions():
    """Every case with every layout of its family that is read under its name."""
    for case in [*PUBLISHED, *GOLDEN_CASES]:
        title = "EAGLE-1/2" if "EAGLE-2" in case else "EAGLE-3" if case in PUBLISHED else "DFlash"
        title = "P-EAGLE" if "peagle" in case else title
        (layouts,) = (layouts for family, layouts in FAMILIES.items() if family.title == title)
        yield from ((case, layout.name) for layout in layouts if layout.name not in SERVERS)


def refusal(case: str, to: str, meaning) -> str | None:
    """Why a layout cannot say what a case means; None if it can."""
    needs_head = to == "speculators" or "of a part" in case  # a head of all tokens can be left to the target
    if "without a head" in case and needs_head and not to.startswith(("modelopt", "specdec")):
        return "no head of its own"
    if case in PUBLISHED or "peagle" in case:
        return None
    if to == "deepspec" and meaning.forward.label == "p+k":
        return "this layout is for blocks whose slot k|this layout has no conditional head"
    return "in this layout a window ends" if to == "speculators" and "windows" in case else None


@pytest.mark.matrix
@pytest.mark.parametrize(("case", "to"), conversions())
def test_converted_and_back_bit_for_bit(case, to, tmp_path):
    """In every layout that can say it; the others say why they cannot."""
    source, target = source_of(case, tmp_path)
    checkpoint = open_checkpoint(source)
    asked = target if checkpoint.meaning.taps else None  # listed taps are named by the target's layers
    if (why := refusal(case, to, checkpoint.meaning)) is not None:
        with pytest.raises(ValueError, match=why):
            convert(source, tmp_path / "there", to, asked)
        return
    convert(source, tmp_path / "there", to, asked)
    there = open_checkpoint(tmp_path / "there")
    assert there.layout.name == to
    assert there.meaning == checkpoint.meaning
    convert(tmp_path / "there", tmp_path / "back", checkpoint.layout.name, asked)
    assert open_checkpoint(tmp_path / "back").meaning == there.meaning
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "back"))
    if checkpoint.layout.name == "deepspec":
        after = without(after, "embed_tokens.weight", "lm_head.weight")
    torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", [*LEARNERS, *PARALLEL, "dflash", "dspark"])
def test_what_is_saved_is_loaded_and_not_drawn_first(kind, tmp_path):
    """Of large heads that would take seconds. Nothing is in doubt or wrong, and NaN in any tensor would be found."""
    target = tiny_target()
    saved = tiny_parallel(target, kind) if kind in PARALLEL else DRAFTERS[kind](target)
    save_drafter(saved, tmp_path / "it", target)
    before = torch.random.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = load_drafter(tmp_path / "it", target)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert (loaded.switches, loaded.taps, loaded.block) == (saved.switches, saved.taps, saved.block)
    for name, parameter in saved.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name
    assert inspect(tmp_path / "it")["problems"] == []
    if "pard" not in kind:  # a language model, which decodes
        with pytest.raises(ValueError, match=r"it is a drafter \(\w+\), not a target: give it as the draft"):
            load_target(tmp_path / "it")
    tensors = load_file(tmp_path / "it" / "model.safetensors")
    weights = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    for tensor in weights.values():
        tensor.view(-1)[0] = torch.nan
    edit_tensors(tmp_path / "it", **weights)
    for headers in (True, False):
        found = open_checkpoint(tmp_path / "it", headers).nonfinite
        assert sorted(sentence.split()[0] for sentence in found) == sorted(weights)


def test_what_a_layout_cannot_say_is_refused(tmp_path):
    source, target = source_of("EAGLE", tmp_path)
    edit_config(source, taps=[2, 4, LAYERS])
    for server in ("sglang", "vllm"):
        with pytest.raises(ValueError, match=f"hidden state {LAYERS}"):
            export(source, tmp_path / "there", server, target)
    with pytest.raises(ValueError, match="give --target"):
        export(source, tmp_path / "there", "sglang")
    edit_config(source, "taps", norm_output=False)
    with pytest.raises(ValueError, match="no final norm"):
        export(source, tmp_path / "there", "vllm", target)
    with pytest.raises(ValueError, match="knows no head_norm"):
        export(source, tmp_path / "there", "sglang", target)
    with pytest.raises(ValueError, match="has the layouts"):
        convert(source, tmp_path / "there", "medusa")
    with pytest.raises(ValueError, match="is the checkpoint itself"):
        convert(source, source, "speculators")


def test_exports_hold_of_the_target_what_they_need_and_name_it(tmp_path):
    source, target = source_of("speculators with everything", tmp_path)
    export(source, tmp_path / "vllm", "vllm", target)
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(load_file(tmp_path / "vllm" / "model.safetensors")["embed_tokens.weight"], embedding.bfloat16())
    config = json.loads((tmp_path / "vllm" / "config.json").read_text())
    verifier = {"name_or_path": str(target), "architectures": ["LlamaForCausalLM"]}
    assert config["speculators_config"]["verifier"] == verifier
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 6]
    with pytest.raises(ValueError, match="knows no"):
        export(source, tmp_path / "no", "sglang", target)
    export(publish(tmp_path / "other", "EAGLE-2 of Llama 3"), tmp_path / "sglang", "sglang")
    assert "embed_tokens.weight" not in load_file(tmp_path / "sglang" / "model.safetensors")
    headless = publish(tmp_path / "headless", "ModelOpt without a head")
    convert(headless, tmp_path / "there", "eagle3", target)  # a tied target, whose head is its embedding
    assert torch.equal(load_file(tmp_path / "there" / "model.safetensors")["lm_head.weight"], embedding.bfloat16())
    # servers know no demo/target
    written = speculators_fields("eagle3", "Eagle3Speculator", TargetFacts("demo/target", (), 8, lambda part: None))
    assert Path(written["speculators_config"]["verifier"]["name_or_path"]).is_dir()


@pytest.mark.parametrize("fc_bias", [True, False])
def test_eagle_in_the_words_of_sglang(fc_bias, tmp_path):
    """Its `fc` always has a bias, and `bias` in a config is that of the attention there."""
    target = tiny_target()
    drafter = eagle_drafter.create(target, fc_bias=fc_bias)
    save_drafter(drafter, tmp_path / "saved", target)
    export(tmp_path / "saved", tmp_path / "there", "sglang")
    assert "bias" not in json.loads((tmp_path / "there" / "config.json").read_text())
    again, x = load_drafter(tmp_path / "there", target), torch.randn(3, 2 * target.config.hidden)
    assert again.fc.bias is not None
    assert torch.equal(again.fc.weight, drafter.fc.weight)
    assert torch.allclose(again.fc(x), drafter.fc(x))


def test_a_dtype_by_a_name_that_there_is_not():
    with pytest.raises(ValueError, match="must be one of bf16, fp16, fp32, int8, got 'int4'"):
        load_drafter("ngram", tiny_target(), dtype="int4")
