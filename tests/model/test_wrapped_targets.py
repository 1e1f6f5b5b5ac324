"""Checkpoints that wrap a language model: the text part loads, and equals the inner model.

The ends of a target, which load without its layers, are the whole target's.
"""

import json

import pytest
import torch
from helpers import edit_config, edit_tensors, save_hf
from hybrids import LINEAR, MOE, SMALL_DEEPSEEK, SMALL_MOE
from safetensors.torch import load_file, save_file
from test_archs import GEMMA3_TEXT

from specdec.model.ends import load_ends
from specdec.model.hf_target import TransformersTarget
from specdec.model.loader import load_target
from specdec.model.target import Target

NAMINGS = {
    "older": ("language_model.model.", "language_model.lm_head."),
    "newer": ("model.language_model.", "lm_head."),
    "unprefixed": ("model.", "lm_head."),
}
FAMILIES = {  # the class, the outer family, and fields
    "llama": (Target, "llava", {}),
    "olmo2": (TransformersTarget, "llava", {}),
    "gemma3_text": (Target, "gemma3", GEMMA3_TEXT),
}


def wrap(inner, folder, naming: str, **outer) -> None:
    """Write the checkpoint `inner` as the text part of one that sees."""
    model, head = NAMINGS[naming]
    tensors = {
        name.replace("model.", model, 1).replace("lm_head.", head, 1): value
        for name, value in load_file(inner / "model.safetensors").items()
    }
    tensors |= {"vision_tower.weight": torch.ones(3), "model.multi_modal_projector.weight": torch.ones(3)}
    text = json.loads((inner / "config.json").read_text())
    config = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "text_config": text} | outer
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("naming", NAMINGS)
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_the_text_part_equals_the_inner_model(family, naming, tmp_path, capsys):
    kind, outer, fields = FAMILIES[family]
    model = save_hf(tmp_path / "inner", family, **fields)
    edit_config(tmp_path / "inner", "hidden_activation")  # released configs leave most text fields out
    wrap(tmp_path / "inner", tmp_path / "whole", naming, model_type=outer)
    target = load_target(tmp_path / "whole", tokenizer=False)
    assert type(target) is kind
    assert "it reads and writes text only" in capsys.readouterr().err
    assert target.eos == {2}
    ids = torch.randint(99, (2, 20))
    alone, _ = load_target(tmp_path / "inner", tokenizer=False)(ids, None)
    logits, _ = target(ids, None)
    assert torch.equal(logits, alone)
    torch.testing.assert_close(logits, model(ids).logits, rtol=0, atol=1e-4)
    extra = f"{NAMINGS[naming][0]}layers.0.extra"
    edit_tensors(tmp_path / "whole", **{extra: torch.ones(1)})
    with pytest.raises(ValueError, match=f"holds the tensor {extra}"):
        load_target(tmp_path / "whole", tokenizer=False)


def test_the_outer_config_says_whether_the_head_is_tied(tmp_path):
    save_hf(tmp_path / "inner", "llama")
    wrap(tmp_path / "inner", tmp_path / "whole", "older", tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from the embedding"):
        load_target(tmp_path / "whole", tokenizer=False)


# The ends

WITH_ENDS = {
    "gemma3_text": {"head_dim": 16},
    "qwen3_moe": SMALL_MOE | {"head_dim": 16},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 16},
    "deepseek_v3": SMALL_DEEPSEEK,
    "glm4_moe": SMALL_MOE | {"n_routed_experts": 4, "head_dim": 16},
    "qwen3_next": LINEAR | MOE,
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": LINEAR | MOE,
}


@pytest.fixture(autouse=True)
def no_tokenizer(monkeypatch):
    monkeypatch.setattr("specdec.model.ends.load_tokenizer", lambda folder: None)


@pytest.mark.parametrize("family", WITH_ENDS)
@torch.inference_mode()
def test_norm_and_head_make_the_models_logits(family, tmp_path):
    """For states before the final norm, which `cache from_vllm` gets."""
    model, seen = save_hf(tmp_path, family, **WITH_ENDS[family]), []
    model.model.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    ids = torch.randint(99, (1, 9), generator=torch.Generator().manual_seed(0))
    logits, ends = model(ids).logits, load_ends(tmp_path)
    torch.testing.assert_close(ends.logits(ends.norm(seen[0][0])), logits[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(ends.embed(ids), model.model.embed_tokens.weight[ids])
    assert (ends.config.layers, ends.config.hidden, ends.vocab) == (3, 48, 99)


def test_they_are_the_whole_targets(target_path):
    whole, ends = load_target(target_path), load_ends(target_path)
    for name, weight in ends.named_parameters():
        assert torch.equal(weight, whole.get_parameter(name)), name
    assert ends.config == whole.config
    assert (ends.query_heads, ends.cache_shape, ends.eos) == (whole.query_heads, whole.cache_shape, whole.eos)
    with pytest.raises(ValueError, match="only the ends are loaded, so it cannot run"):
        ends(torch.tensor([[1, 2]]), None)


@pytest.mark.parametrize("naming", ["older", "newer"])
def test_a_wrapped_and_quantised_target_has_the_inner_ends(naming, tmp_path):
    """Layers may be in whatever form: they are not read."""
    model = save_hf(tmp_path / "inner", "qwen3_moe", **WITH_ENDS["qwen3_moe"])
    wrap(tmp_path / "inner", tmp_path / "whole", naming, quantization_config={"quant_method": "fp8"})
    assert torch.equal(load_ends(tmp_path / "whole").head.weight, model.lm_head.weight)


def test_what_is_not_known_is_refused(tmp_path):
    save_hf(tmp_path, "olmo2")
    with pytest.raises(ValueError, match="family 'olmo2' is not native, and how its embedding, norm and head work is"):
        load_ends(tmp_path)
    edit_config(tmp_path, "num_attention_heads", model_type="mixtral")
    with pytest.raises(ValueError, match=r"config\.json lacks the field 'num_attention_heads'"):
        load_ends(tmp_path)
