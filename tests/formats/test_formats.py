"""Every layout, by its published names and shapes: recognised, read strictly, converted to the others and back."""

import json
from pathlib import Path

import pytest
import torch
from helpers import DRAFTERS, tiny_target
from published import (
    CONFIG,
    LAYERS,
    PUBLISHED,
    H,
    V,
    eagle3_shapes,
    make_target,
    publish,
    random_tensors,
    without,
    written,
)
from safetensors.torch import load_file

from specdec.drafters import eagle as eagle_drafter
from specdec.drafters.formats import FAMILIES, eagle, eagle3, load_drafter, open_checkpoint, recognise, save_drafter
from specdec.drafters.formats.base import TargetFacts
from specdec.drafters.formats.convert import SERVERS, convert, export
from specdec.drafters.formats.speculators import speculators_fields
from specdec.model.loader import load_target
from specdec.model.rope import Rope


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


def conversions():
    """Every case with every other layout of its family."""
    for case, (layout, *_) in PUBLISHED.items():
        for other in FAMILIES[(eagle if "EAGLE-2" in case else eagle3).FAMILY]:
            if other.name not in (layout, *SERVERS):  # what is written for a server is not read under its name
                yield case, other.name


@pytest.mark.parametrize(("case", "to"), conversions())
def test_converted_and_back_bit_for_bit(case, to, target_folder, tmp_path):
    layout, *_ = PUBLISHED[case]
    source = publish(tmp_path / "source", case)
    target = target_folder if open_checkpoint(source).meaning.taps else None  # listed taps are named by its layers
    needs_head = to == "speculators" or "of a part" in case  # a head of all tokens can be left to the target
    if "without a head" in case and needs_head and not to.startswith("modelopt"):
        with pytest.raises(ValueError, match="no head of its own"):
            convert(source, tmp_path / "there", to)
        return
    convert(source, tmp_path / "there", to, target)
    there = open_checkpoint(tmp_path / "there")
    assert there.layout.name == to
    assert there.meaning == open_checkpoint(source).meaning
    convert(tmp_path / "there", tmp_path / "back", layout, target)
    assert open_checkpoint(tmp_path / "back").meaning == there.meaning
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "back"))
    assert set(before) == set(after)
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype
        assert torch.equal(tensor, after[name]), name


def test_real_sizes_of_llama_3_1_8b_on_the_meta_device():
    """yuhuili/EAGLE3-LLaMA3.1-Instruct-8B: its names, shapes and config, against a target of the real size."""
    sizes = (4096, 14336, 32, 8, 128)
    target = make_target(
        "meta", layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256
    )
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 1, "rms_norm_eps": 1e-5,
        "vocab_size": 128256, "draft_vocab_size": 32000, "max_position_embeddings": 2048, "torch_dtype": "float16",
    }  # fmt: skip
    tensors = {
        name: torch.empty(shape, dtype=torch.float16, device="meta")
        for name, shape in eagle3_shapes("midlayer", 4096, 32000, sizes).items()
    }
    ids = torch.arange(32000) * 4
    tensors |= {"d2t": ids - torch.arange(32000), "t2d": torch.zeros(128256, dtype=torch.bool).index_fill(0, ids, True)}
    family, layout = recognise(config, tensors, "llama")
    meaning, found = layout.read(config, tensors, "llama")
    drafter = family.construct(meaning, found, target, "llama")
    assert drafter.taps == (2, 16, 29)
    assert drafter.shape.rope == Rope(10000.0)
    assert sum(p.numel() for p in drafter.parameters()) == 424_689_664  # 0.85 GB in fp16
    for other in (layout for layout in FAMILIES[family] if layout.name not in SERVERS):
        spelled_config, spelled = other.write(meaning, found, None)
        again, back = other.read(spelled_config, spelled, "llama")
        assert again == meaning
        assert {n: t.shape for n, t in layout.write(again, back, None)[1].items()} == {
            n: t.shape for n, t in tensors.items()
        }


# Conversions that need the target, or cannot be made


@pytest.fixture
def target_folder(tmp_path):
    fields = CONFIG | {"model_type": "llama", "num_hidden_layers": LAYERS, "architectures": ["LlamaForCausalLM"]}
    head = torch.randn(V, H, generator=torch.Generator().manual_seed(3))
    return written(tmp_path / "target", fields, {"model.embed_tokens.weight": head})


def test_a_head_that_is_the_targets_is_copied_on_request(target_folder, tmp_path):
    source = publish(tmp_path / "source", "ModelOpt without a head")
    convert(source, tmp_path / "there", "eagle3", target_folder)
    head = load_file(target_folder / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(load_file(tmp_path / "there" / "model.safetensors")["lm_head.weight"], head.bfloat16())


def test_what_a_layout_cannot_say_is_refused(target_folder, tmp_path):
    source = publish(tmp_path / "source", "EAGLE")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"taps": [2, 4, LAYERS]}))
    for server in ("sglang", "vllm"):
        with pytest.raises(ValueError, match=f"hidden state {LAYERS}"):
            export(source, tmp_path / "there", server, target_folder)
    with pytest.raises(ValueError, match="give --target"):
        export(source, tmp_path / "there", "sglang")
    (source / "config.json").write_text(json.dumps(config | {"norm_output": False}))
    with pytest.raises(ValueError, match="no final norm"):
        export(source, tmp_path / "there", "vllm", target_folder)
    with pytest.raises(ValueError, match="knows no head_norm"):
        export(source, tmp_path / "there", "sglang", target_folder)
    with pytest.raises(ValueError, match="has the layouts"):
        convert(source, tmp_path / "there", "medusa")
    with pytest.raises(ValueError, match="is the checkpoint itself"):
        convert(source, source, "speculators")


def test_an_export_names_a_folder_where_the_target_is_bundled():
    """Servers know no demo/target."""
    told = speculators_fields("eagle3", "Eagle3Speculator", TargetFacts("demo/target", (), 8, lambda part: None))
    assert Path(told["speculators_config"]["verifier"]["name_or_path"]).is_dir()


def test_exports_hold_no_embedding_but_the_targets_and_name_it(target_folder, tmp_path):
    source = publish(tmp_path / "source", "speculators with everything")
    export(source, tmp_path / "vllm", "vllm", target_folder)
    embedding = load_file(target_folder / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(load_file(tmp_path / "vllm" / "model.safetensors")["embed_tokens.weight"], embedding.bfloat16())
    config = json.loads((tmp_path / "vllm" / "config.json").read_text())
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": str(target_folder),
        "architectures": ["LlamaForCausalLM"],
    }
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 6]
    other = publish(tmp_path / "other", "EAGLE-2 of Llama 3")
    export(other, tmp_path / "sglang", "sglang")
    assert "embed_tokens.weight" not in load_file(tmp_path / "sglang" / "model.safetensors")
    with pytest.raises(ValueError, match="knows no"):
        export(source, tmp_path / "no", "sglang", target_folder)


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


@pytest.mark.parametrize("kind", ["eagle3", "eagle", "mtp-three-heads", "medusa", "dflash", "peagle", "pard2"])
def test_what_is_read_is_not_drawn_first(kind, tmp_path):
    """Of large heads that would take seconds."""
    target = tiny_target()
    saved = DRAFTERS[kind](target)
    save_drafter(saved, tmp_path / "it", target)
    before = torch.random.get_rng_state()
    loaded = load_drafter(tmp_path / "it", target)
    assert torch.equal(torch.random.get_rng_state(), before)
    for name, parameter in saved.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter)


@pytest.mark.parametrize("kind", ["eagle3", "eagle", "mtp", "medusa", "dflash", "dspark", "peagle"])
def test_a_drafter_is_no_target(kind, tmp_path):
    """PARD is left out: it is a language model, and decodes."""
    target = tiny_target()
    save_drafter(DRAFTERS[kind](target), tmp_path / "draft", target)
    with pytest.raises(ValueError, match=r"draft is a drafter \(\w+\), not a target: give it as the draft"):
        load_target(tmp_path / "draft")


def test_a_dtype_by_a_name_that_there_is_not():
    with pytest.raises(ValueError, match="must be one of bf16, fp16, fp32, int8, got 'int4'"):
        load_drafter("ngram", tiny_target(), dtype="int4")
