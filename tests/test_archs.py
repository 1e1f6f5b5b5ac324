"""Logits of every family agree with transformers: prefill, token by token, biases, norms, GQA, tying, shards, rope."""

import json

import pytest
import torch
from helpers import save_hf

from specdec.loader import load_target

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
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
    "qwen2": {"family": "qwen2"},
    "qwen2-tied": {"family": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"family": "qwen3", "head_dim": 16},
    "qwen3-biases": {"family": "qwen3", "head_dim": 16, "attention_bias": True},
}


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_logits_match_transformers(case, tmp_path):
    model = save_hf(tmp_path, **CASES[case])
    assert (tmp_path / "model.safetensors.index.json").exists() == ("shard" in CASES[case])
    target = load_target(tmp_path, tokenizer=False)
    ids = torch.randint(99, (2, 40))
    out = model(ids, output_hidden_states=True)
    taps = range(4)

    cache = target.new_cache(2, 48)
    logits, feats = target(ids, cache, taps=taps)
    torch.testing.assert_close(logits, out.logits, rtol=0, atol=1e-4)
    torch.testing.assert_close(feats, torch.cat(out.hidden_states, -1), rtol=0, atol=1e-4)

    cache = target.new_cache(2, 48)
    n = torch.tensor([20, 20])
    first, _ = target(ids[:, :20], cache)
    cache.advance(n, 20)
    pieces = [first]
    for i in range(20, 40):
        logits, _ = target(ids[:, i : i + 1], cache)
        cache.advance(torch.ones_like(n), i + 1)
        pieces.append(logits)
    torch.testing.assert_close(torch.cat(pieces, 1), out.logits, rtol=0, atol=1e-4)


@torch.inference_mode()
def test_ragged_prefill_and_tree_match_single_sequences(tmp_path):
    """Rows of different lengths, then a tree: each node's logits are those of the plain sequence root..node."""
    model = save_hf(tmp_path, "qwen3", head_dim=16)
    target = load_target(tmp_path, tokenizer=False)
    prompts = [torch.randint(99, (n,)) for n in (5, 17, 11)]
    padded = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
    lens = torch.tensor([len(p) for p in prompts])
    cache = target.new_cache(3, 64)
    last, _ = target(padded, cache, last=lens - 1)
    cache.advance(lens, 17)
    tokens = torch.randint(99, (3, 4))
    ancestors = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]).bool().expand(3, 4, 4)
    depth = torch.tensor([0, 1, 1, 2]).expand(3, 4)
    logits, _ = target(tokens, cache, depth=depth, ancestors=ancestors)
    paths = [[0], [0, 1], [0, 2], [0, 2, 3]]
    for b, prompt in enumerate(prompts):
        torch.testing.assert_close(last[b, 0], model(prompt[None]).logits[0, -1], rtol=0, atol=1e-4)
        for node, path in enumerate(paths):
            expected = model(torch.cat([prompt, tokens[b, path]])[None]).logits[0, -1]
            torch.testing.assert_close(logits[b, node], expected, rtol=0, atol=1e-4)

    # Accept root, 2, 3 of row 0, the root alone of row 1, root and 1 of row 2; then go on with one token each.
    cache.commit(torch.tensor([[0, 2, 3], [0, 0, 0], [0, 1, 0]]), torch.tensor([3, 1, 2]), 20)
    following = torch.randint(99, (3, 1))
    logits, _ = target(following, cache)
    for b, path in enumerate(([0, 2, 3], [0], [0, 1])):
        sequence = torch.cat([prompts[b], tokens[b, path], following[b]])
        torch.testing.assert_close(logits[b, 0], model(sequence[None]).logits[0, -1], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model family 'gpt2' is not supported"),
        ({"hidden_act": "gelu"}, "activation 'gelu' is not supported"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
            "rope type 'yarn' is not supported",
        ),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
    ],
)
def test_what_we_would_approximate_is_refused_by_name(change, message, tmp_path):
    save_hf(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=message):
        load_target(tmp_path, tokenizer=False)


def test_old_rope_spelling_is_read_like_the_new(tmp_path):
    save_hf(tmp_path, "llama", rope_parameters=LLAMA3_ROPE)
    new = load_target(tmp_path, tokenizer=False).config
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_target(tmp_path, tokenizer=False).config == new


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_files_load(dtype, tmp_path):
    model = save_hf(tmp_path, "llama", dtype=dtype)
    target = load_target(tmp_path, dtype="fp32", tokenizer=False)
    assert torch.equal(target.blocks[0].mlp.down.weight, model.model.layers[0].mlp.down_proj.weight.float())
