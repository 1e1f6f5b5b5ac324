"""Models of transformers that are not native decode exactly through their own modules, or are refused by name."""

import inspect

import pytest
import torch
from helpers import edit_config, edit_tensors, save_hf
from test_archs import MIXED
from transformers import GPT2LMHeadModel

import specdec
from specdec import Engine, load_target
from specdec.drafters import eagle3
from specdec.model.hf_target import TransformersTarget
from specdec.trees import DynamicTree

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


def load(folder, **options) -> TransformersTarget:
    target = load_target(folder, tokenizer=False, **options)
    assert isinstance(target, TransformersTarget)
    return target


@torch.inference_mode()
def test_a_native_family_gives_the_same_either_way(tmp_path, capsys):
    save_hf(tmp_path, "gemma3_text", head_dim=16, pad_token_id=0, **MIXED)
    native = load_target(tmp_path, tokenizer=False)
    capsys.readouterr()
    other = load(tmp_path, generic=True)
    assert capsys.readouterr().err == ""
    ids = torch.randint(99, (2, 30))
    for ours, theirs in zip(native(ids, None, taps=(0, 3)), other(ids, None, taps=(0, 3)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    for field in ("layers", "hidden", "intermediate", "heads", "kv_heads", "vocab", "context", "tied"):
        assert getattr(native.config, field) == getattr(other.config, field)


def test_learned_positions_to_the_end_of_the_context(tmp_path):
    """Trees near the end reach beyond the last position that has a row in the table."""
    save_hf(tmp_path, "gpt2", head=15.0, max_position_embeddings=32)
    target = load(tmp_path)
    prompts = [[3] * 20, [5, 6], [1] * 31]
    plain = [Engine(target).generate([p], max_new_tokens=100, eos=frozenset()).rows[0] for p in prompts]
    engine = Engine(target, eagle3.create(target).eval(), DynamicTree(3, 3, 9))
    fast = engine.generate(prompts, max_new_tokens=100, eos=frozenset()).rows
    assert [row.tokens for row in fast] == [row.tokens for row in plain]
    assert [row.finish for row in fast] == ["context"] * 3
    assert [len(row.prompt) + len(row.tokens) for row in fast] == [32] * 3


@pytest.mark.parametrize(
    ("family", "fields", "context"),
    [
        ("llama", {"rope_parameters": DYNAMIC}, 128),
        ("llama4_text", {"attention_chunk_size": 16, "num_local_experts": 2, "head_dim": 16}, 16),
        ("phi3", {"pad_token_id": 0, "original_max_position_embeddings": 64, "rope_parameters": LONG}, 64),
    ],
)
def test_the_context_ends_where_exactness_ends(family, fields, context, tmp_path):
    save_hf(tmp_path, family, **fields)
    assert load(tmp_path).config.context == context


@pytest.mark.parametrize("ignored", ["attention_mask", "position_ids"])
def test_the_check_on_loading_notices_a_model_that_does_not_listen(ignored, tmp_path, monkeypatch):
    save_hf(tmp_path, "gpt2")
    forward = GPT2LMHeadModel.forward
    wraps = lambda self, *args, **kwargs: forward(self, *args, **kwargs | {ignored: None})  # noqa: E731
    wraps.__signature__ = inspect.signature(forward)
    monkeypatch.setattr(GPT2LMHeadModel, "forward", wraps)
    with pytest.raises(ValueError, match="cannot verify trees"):
        load_target(tmp_path, tokenizer=False)


def test_files_are_read_strictly(tmp_path):
    save_hf(tmp_path, "olmo2")
    edit_tensors(tmp_path, **{"mtp.fc.weight": torch.ones(1)})
    load(tmp_path)  # heads for multi-token prediction are known by name
    edit_tensors(tmp_path, extra=torch.ones(1))
    with pytest.raises(ValueError, match="holds the tensor extra"):
        load_target(tmp_path, tokenizer=False)
    edit_tensors(tmp_path, "extra", "model.norm.weight")
    with pytest.raises(ValueError, match=r"lacks the tensor model\.norm\.weight"):
        load_target(tmp_path, tokenizer=False)
    edit_config(tmp_path, model_type="nobody")
    with pytest.raises(ValueError, match="nobody"):
        load_target(tmp_path, tokenizer=False)


def test_half_precision_decodes(tmp_path):
    save_hf(tmp_path, "gpt_neox")
    target = load(tmp_path, dtype="bf16")
    drafter = eagle3.create(target).to(torch.bfloat16).eval()
    rows = Engine(target, drafter, DynamicTree(3, 3, 9)).generate([[1, 2], [3]], max_new_tokens=9).rows
    assert all(0 < len(row.tokens) <= 9 for row in rows)


@pytest.mark.parametrize(("family", "generic"), [("llama", False), ("llama", True), ("gpt_neox", False)])
def test_a_model_in_memory_is_a_target_and_a_draft_model(family, generic, tmp_path):
    model = save_hf(tmp_path, family, vocab_size=60, eos_token_id=7, head=4.0)
    target = load_target(model, generic=generic)
    loaded = load_target(tmp_path, tokenizer=False, generic=generic)
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        assert torch.equal(target(tokens, None)[0], loaded(tokens, None)[0])
        torch.testing.assert_close(target(tokens, None)[0], model(tokens).logits, rtol=1e-4, atol=1e-4)
    assert (target.eos, target.tokenizer) == ({7}, None)
    prompt = [[1, 2, 3, 4, 5]]
    plain = specdec.generate(target if generic else model, prompt, max_new_tokens=20)
    drafted = specdec.generate(target, prompt, model, tree="1/3/4", max_new_tokens=20)
    assert drafted.rows[0].tokens == plain.rows[0].tokens
    assert drafted.tau > 3  # it drafts for itself
