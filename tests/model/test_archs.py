"""Logits of every family agree with transformers: prefill, step by step, trees, biases, windows, shards, rope."""

import pytest
import torch
from helpers import assert_same_greedy_text, assert_tree_matches, edit_config, edit_tensors, save_hf
from hybrids import SMALL_DEEPSEEK, SMALL_MOE
from transformers import AutoModelForCausalLM

from specdec.model.hf_target import TransformersTarget
from specdec.model.loader import load_target
from specdec.model.target import Target

MIXED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 5e3, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}
GEMMA3_TEXT = MIXED | {"head_dim": 16, "query_pre_attn_scalar": 24, "pad_token_id": 0, "rope_parameters": GEMMA3_ROPE}
GEMMA3 = {"family": "gemma3_text"} | GEMMA3_TEXT
OLDER_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
OLDER_LLAMA3 |= {"original_max_position_embeddings": 32}
LLAMA3_ROPE = OLDER_LLAMA3 | {"rope_theta": 500.0}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
CASES = {
    "llama": {"family": "llama"},
    "llama-tied": {"family": "llama", "tie_word_embeddings": True},
    "llama-biases": {"family": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-mha": {"family": "llama", "num_key_value_heads": 6},
    "llama-head-dim": {"family": "llama", "head_dim": 16},
    "llama3-rope": {"family": "llama", "rope_parameters": LLAMA3_ROPE},
    "linear-rope": {"family": "llama", "rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}},
    "llama-sharded": {"family": "llama", "shard": "20KB"},
    "mistral": {"family": "mistral", "sliding_window": None},
    "mistral-window": {"family": "mistral", "sliding_window": 8},
    "mistral-window-within-the-tree": {"family": "mistral", "sliding_window": 2},
    "qwen2": {"family": "qwen2"},
    "qwen2-tied": {"family": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"family": "qwen3", "head_dim": 16},
    "qwen3-biases": {"family": "qwen3", "head_dim": 16, "attention_bias": True},
    "qwen2-window": {"family": "qwen2", **QWEN_WINDOW},
    "qwen3-window": {"family": "qwen3", "head_dim": 16, **QWEN_WINDOW},
    "gemma3": GEMMA3,
    "gemma3-untied": GEMMA3 | {"tie_word_embeddings": False, "attention_bias": True},
    "gemma3-softcap": GEMMA3 | {"final_logit_softcapping": 2.0},
    "gemma3-within-the-tree": GEMMA3 | {"sliding_window": 2},
    "gemma3-pattern": GEMMA3 | {"layer_types": None, "sliding_window_pattern": 2},
}
WINDOWS = [case for case in CASES if "window" in case or "gemma3" in case]
GENERIC = {  # run by the modules of transformers
    "gpt2": {"family": "gpt2"},  # learned positions
    "gpt_neox": {"family": "gpt_neox", "rotary_pct": 0.5},  # parallel block, rotary part of a head
    "phi3": {"family": "phi3", "pad_token_id": 0},  # fused projections
    "olmo2": {"family": "olmo2"},  # norms after attention and MLP only
    "gemma2": {"family": "gemma2", "head_dim": 16, **MIXED},  # soft-caps, two types of layers
    "mixtral": {"family": "mixtral", "sliding_window": 8, "num_local_experts": 4},  # experts, windows everywhere
    # A dense layer among them.
    "qwen3_moe": SMALL_MOE | {"family": "qwen3_moe", "head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [1]},
    # Attention sinks, biased experts.
    "gpt_oss": MIXED
    | {"family": "gpt_oss", "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0},
    # A latent cache: keys and values of different width, not those of the heads.
    "deepseek_v3": SMALL_MOE
    | SMALL_DEEPSEEK
    | {"family": "deepseek_v3", "kv_lora_rank": 20, "first_k_dense_replace": 1},
}


def load(folder, case: str, **options) -> Target | TransformersTarget:
    target = load_target(folder, tokenizer=False, **options)
    assert type(target) is (TransformersTarget if case in GENERIC else Target)
    return target


@pytest.mark.parametrize("case", CASES | GENERIC)
@torch.inference_mode()
def test_logits_and_taps_match_transformers(case, tmp_path, capsys):
    fields = (CASES | GENERIC)[case]
    model = save_hf(tmp_path, **fields)
    assert (tmp_path / "model.safetensors.index.json").exists() == ("shard" in fields)
    capsys.readouterr()
    target = load(tmp_path, case)
    note = f"note: {tmp_path}: model family {fields['family']!r} is not native; transformers' own modules decode it, "
    assert capsys.readouterr().err == (note + "which is slower\n" if case in GENERIC else "")
    ids = torch.randint(99, (2, 40))
    out = model(ids, output_hidden_states=True)
    for cache in (target.new_cache(2, 48), None):
        logits, feats = target(ids, cache, taps=range(4))
        torch.testing.assert_close(logits, out.logits, rtol=0, atol=1e-4)
        torch.testing.assert_close(feats, torch.cat(out.hidden_states, -1), rtol=0, atol=1e-4)
    nothing, feats = target(ids, None, taps=(3,), logits=False)
    assert nothing is None
    torch.testing.assert_close(feats, out.hidden_states[3], rtol=0, atol=1e-4)
    for rows in (2, 1):
        cache = target.new_cache(rows, 48)
        pieces = [target(ids[:rows, :20], cache)[0]]
        cache.advance(torch.full((rows,), 20), 20)
        for i in range(20, 40):
            pieces.append(target(ids[:rows, i : i + 1], cache)[0])
            cache.advance(torch.ones(rows, dtype=torch.int64), i + 1)
        torch.testing.assert_close(torch.cat(pieces, 1), out.logits[:rows], rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", ["qwen3", "llama", *WINDOWS, *GENERIC])
def test_ragged_prefill_and_tree_match_single_sequences(case, tmp_path):
    """Rows of different lengths, two of them longer than the window, then a tree, then one token each."""
    model = save_hf(tmp_path, **(CASES | GENERIC)[case])
    assert_tree_matches(model, load(tmp_path, case))


@pytest.mark.matrix
@pytest.mark.parametrize("case", ["mistral-window", "gemma3-untied", *GENERIC])
def test_greedy_text_is_that_of_generate(case, tmp_path):
    """Beyond the window, too."""
    model = save_hf(tmp_path, head=15.0, **(CASES | GENERIC)[case])
    assert_same_greedy_text(model, load(tmp_path, case))


def test_gemma3_half_precision_rounds_as_transformers_does(tmp_path):
    """The embeddings' scale and the norms' offset are rounded where transformers rounds them."""
    model = save_hf(tmp_path, dtype=torch.bfloat16, **GEMMA3)
    target = load_target(tmp_path, dtype="bf16", tokenizer=False)
    ids = torch.arange(40)[None]
    _, feats = target(ids, None, taps=(0,))
    first = model(ids, output_hidden_states=True).hidden_states[0]
    assert torch.equal(feats, first)
    assert torch.equal(target.blocks[0].input_norm(first[0]), model.model.layers[0].input_layernorm(first[0]))


OLDER_GEMMA3 = {"rope_theta": 5e3, "rope_local_base_freq": 300.0, "sliding_window_pattern": 2}
OLDER_GEMMA3 |= {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}


@pytest.mark.parametrize(
    ("case", "dropped", "older"),
    [
        ("llama3-rope", (), {"rope_theta": 500.0, "rope_scaling": OLDER_LLAMA3}),
        ("gemma3-pattern", ("layer_types", "_sliding_window_pattern"), OLDER_GEMMA3),
    ],
)
def test_the_older_spelling_of_ropes_is_read_like_the_new(case, dropped, older, tmp_path):
    save_hf(tmp_path, **CASES[case])
    new = load_target(tmp_path, tokenizer=False).config
    edit_config(tmp_path, "rope_parameters", *dropped, **older)
    assert load_target(tmp_path, tokenizer=False).config == new


@pytest.mark.parametrize(
    ("family", "config", "heads", "other"),
    [
        (
            "qwen2",
            {"model_type": "mimo", "attention_bias": True, "num_nextn_predict_layers": 1},
            ["model.mtp_layers.0.input_proj.weight", "model.mtp_layers.0.self_attn.q_proj.bias"],
            "model.mtp_head.weight",
        ),
        ("llama", {"num_nextn_predict_layers": 1}, ["model.layers.3.eh_proj.weight"], "model.layers.4.eh_proj.weight"),
        ("llama", {"num_nextn_predict_layers": 0}, ["mtp.fc.weight"], "model.layers.3.eh_proj.weight"),
    ],
    ids=["mimo", "announced", "none announced"],
)
def test_heads_for_multi_token_prediction_are_set_aside_and_nothing_else(family, config, heads, other, tmp_path):
    model = save_hf(tmp_path, family)
    edit_config(tmp_path, **config)
    edit_tensors(tmp_path, **{name: torch.ones(2) for name in heads})
    assert_tree_matches(model, load_target(tmp_path, tokenizer=False))
    edit_tensors(tmp_path, **{other: torch.ones(2)})
    with pytest.raises(ValueError, match=f"holds the tensor {other}"):
        load_target(tmp_path, tokenizer=False)


@pytest.mark.parametrize(
    ("family", "fields", "change", "message"),
    [
        ("llama", {}, {"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ("gemma3_text", GEMMA3_TEXT, {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping is not supported"),
        ("gemma3_text", GEMMA3_TEXT, {"use_bidirectional_attention": True}, "a target must be causal"),
        ("gemma3_text", GEMMA3_TEXT, {"layer_types": ["full_attention"]}, "names 1 layers, num_hidden_layers is 3"),
        ("qwen2", {"use_sliding_window": True}, {"layer_types": ["linear"] * 3}, "'linear' is not supported"),
        ("deepseek_v32", {}, {}, "'deepseek_v32' is not supported: it has layers of a kind that we do not know"),
        ("bloom", {}, {}, "'bloom' cannot verify trees: it takes no position_ids"),
        ("gpt_neo", {"attention_types": [[["global", "local", "local"], 1]]}, {}, "local layers mask by themselves"),
        ("bert", {}, {}, "'bert' cannot verify trees: its logits in a tree differ"),
    ],
)
def test_what_cannot_be_exact_is_refused_by_name(family, fields, change, message, tmp_path):
    save_hf(tmp_path, family, **fields)
    edit_config(tmp_path, **change)
    with pytest.raises(ValueError, match=message):
        load_target(tmp_path, tokenizer=False)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_act": "gelu"}, "activation 'gelu' is not native"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn' is not native"),
    ],
)
def test_what_our_decoder_cannot_be_runs_through_transformers(change, reason, tmp_path, capsys):
    save_hf(tmp_path, "llama")
    edit_config(tmp_path, **change)
    capsys.readouterr()
    target = load_target(tmp_path, tokenizer=False)
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert reason in err
    assert_tree_matches(AutoModelForCausalLM.from_pretrained(tmp_path), target)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_files_load(dtype, tmp_path):
    model = save_hf(tmp_path, "llama", dtype=dtype)
    target = load_target(tmp_path, dtype="fp32", tokenizer=False)
    assert torch.equal(target.blocks[0].mlp.down.weight, model.model.layers[0].mlp.down_proj.weight.float())
