"""The ends of a target, without its layers: they are the whole target's."""

import pytest
import torch
from helpers import edit_config, save_hf
from hybrids import LINEAR, MOE, SMALL_DEEPSEEK, SMALL_MOE
from test_wrapped_targets import wrap

from specdec.model.ends import load_ends
from specdec.model.loader import load_target

FAMILIES = {
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


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_norm_and_head_make_the_models_logits(family, tmp_path):
    """For states before the final norm, which `cache from_vllm` gets."""
    model, seen = save_hf(tmp_path, family, **FAMILIES[family]), []
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
    model = save_hf(tmp_path / "inner", "qwen3_moe", **FAMILIES["qwen3_moe"])
    wrap(tmp_path / "inner", tmp_path / "whole", naming, quantization_config={"quant_method": "fp8"})
    assert torch.equal(load_ends(tmp_path / "whole").head.weight, model.lm_head.weight)


def test_what_is_not_known_is_refused(tmp_path):
    save_hf(tmp_path, "olmo2")
    with pytest.raises(ValueError, match="family 'olmo2' is not native, and how its embedding, norm and head work is"):
        load_ends(tmp_path)
    edit_config(tmp_path, "num_attention_heads", model_type="mixtral")
    with pytest.raises(ValueError, match=r"config\.json lacks the field 'num_attention_heads'"):
        load_ends(tmp_path)
