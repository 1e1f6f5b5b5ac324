"""Models of transformers that are not native decode exactly through their own modules, or are refused by name."""

import inspect

import pytest
import torch
from helpers import edit_config, edit_tensors, save_hf, tiny_drafter, tiny_target
from test_archs import MIXED
from transformers import GPT2Config, GPT2LMHeadModel

import specdec
from specdec import Engine, Recorder, load_target
from specdec.drafters import eagle3
from specdec.engine.trace_files import read_trace, write_trace
from specdec.lab.traces.metrics import experts_per_verification
from specdec.model.hf_target import TransformersTarget
from specdec.trees import Chain, DynamicTree

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


def test_the_cache_has_either_of_its_names():
    """`past_key_values`, which transformers 5.24 calls `cache`."""
    model = GPT2LMHeadModel(GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=2))
    own = model.forward

    def forward(input_ids, attention_mask=None, position_ids=None, cache=None, logits_to_keep=0, **how):
        where = {"attention_mask": attention_mask, "position_ids": position_ids, "past_key_values": cache}
        return own(input_ids, logits_to_keep=logits_to_keep, **where, **how)

    model.forward = forward
    assert TransformersTarget(model).cache_name == "cache"  # it decodes a tree when it is made


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


@pytest.mark.parametrize("field", ["sliding_window", "attention_chunk_size"])
@torch.inference_mode()
def test_a_window_that_the_family_ignores_is_ignored(field, tmp_path):
    """A Llama made from a Mistral keeps Mistral's `sliding_window`, and its modules attend to everything."""
    model, ids = save_hf(tmp_path, "llama", **{field: 8}), torch.randint(99, (1, 30))
    target = load(tmp_path, generic=True)
    torch.testing.assert_close(target(ids, target.new_cache(1, 32))[0], model(ids, use_cache=False).logits)
    TransformersTarget(model)
    assert getattr(model.config, field) == 8


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
    model = save_hf(tmp_path, "olmo2")
    edit_tensors(tmp_path, **{"mtp.fc.weight": torch.ones(1)})
    load(tmp_path)  # heads for multi-token prediction are known by name
    edit_tensors(tmp_path, extra=torch.ones(1))
    with pytest.raises(ValueError, match="holds the tensor extra"):
        load_target(tmp_path, tokenizer=False)
    edit_tensors(tmp_path, "extra", "model.norm.weight")
    with pytest.raises(ValueError, match=r"lacks the tensor model\.norm\.weight"):
        load_target(tmp_path, tokenizer=False)
    norm = torch.ones(model.config.hidden_size)
    for wrong, sentence in ((norm[1:], r"norm\.weight has shape \[\d+\], the config"), (norm.char(), "whole numbers")):
        edit_tensors(tmp_path, **{"model.norm.weight": wrong})
        with pytest.raises(ValueError, match=sentence):
            load_target(tmp_path, tokenizer=False)
    edit_config(tmp_path, attention_dropout="x")
    with pytest.raises(ValueError, match=r"'attention_dropout'.* expected .*got str"):
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


@torch.inference_mode()
def test_a_target_in_fp8_decodes_in_fp32_on_a_cpu(tmp_path):
    model, ids = save_hf(tmp_path, "llama", head=4.0), torch.randint(99, (1, 30))
    model.model.embed_tokens.bfloat16()
    edit_tensors(tmp_path, **{"model.embed_tokens.weight": model.model.embed_tokens.weight})
    model.float()
    tensors = {name: value for name, value in model.state_dict().items() if name.endswith("_proj.weight")}
    scales = {f"{name}_scale_inv": torch.full((1, 1), 0.5) for name in tensors}
    edit_tensors(tmp_path, **scales, **{name: (2 * x).to(torch.float8_e4m3fn) for name, x in tensors.items()})
    edit_config(tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    for x in tensors.values():
        x.copy_((2 * x).to(torch.float8_e4m3fn).float() / 2)
    target = load(tmp_path)
    torch.testing.assert_close(target(ids, target.new_cache(1, 32))[0], model(ids, use_cache=False).logits)


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


# Mixtures of experts: reports, traces and metrics name the experts that a verification used


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    how = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [0]}
    save_hf(folder, "qwen3_moe", head=15.0, head_dim=16, **how)
    return load_target(folder, tokenizer=False)


def traced(engine: Engine, prompts):
    recorder = Recorder()
    engine.generate(prompts, max_new_tokens=6, eos=frozenset(), observer=recorder)
    return recorder.trace


def test_the_experts_of_a_round_are_counted(experts, tmp_path):
    """A node alone asks 2, a tree of 9 more, and never more than there are or than its nodes can ask."""
    drafter, counts = eagle3.create(experts).eval(), []
    for tree in (Chain(1), DynamicTree(3, 3, 9)):
        trace = traced(Engine(experts, drafter, tree), [[3, 5, 7, 9]])
        counts.append(experts_per_verification(trace.rows))
        assert all(2 <= r.experts <= min(16, 2 * tree.num_draft_tokens) for row in trace.rows for r in row.rounds)
    assert counts[0] < counts[1]
    write_trace(trace, tmp_path / "trace")
    assert experts_per_verification(read_trace(tmp_path / "trace").rows) == counts[1]


def test_they_are_those_that_the_model_chooses(experts):
    """By transformers' own router, over the text and the tree's nodes."""
    engine, seen = Engine(experts, eagle3.create(experts).eval(), Chain(2)), []

    def look(report):
        if report.tree is not None and not seen:
            row = report.rows[0]
            text = row.prompt + row.tokens[: len(row.tokens) - len(report.emitted[0])]
            seen.append((text[:-1] + report.tree.tokens[0].tolist(), [x.clone() for x in report.experts]))

    engine.generate([[3, 5, 7, 9]], max_new_tokens=6, eos=frozenset(), observer=look)
    text, chosen = seen[0]
    with torch.inference_mode():
        router = experts.model(torch.tensor([text]), output_router_logits=True).router_logits
    assert len(chosen) == len(router) == 2  # of three layers one is dense
    for ours, logits in zip(chosen, router, strict=True):
        assert torch.equal(ours.sort().values, logits.topk(2).indices[-3:].sort().values)


def test_a_dense_target_has_none():
    target = tiny_target()
    trace = traced(Engine(target, tiny_drafter(target), Chain(2)), [[3]])
    assert all(r.experts is None for row in trace.rows for r in row.rounds)
