"""Gemma 3, the text model, alone (`gemma3_text`) or inside a checkpoint that sees images too (`gemma3`).

Norms store their weight less 1. Each block has four of them, and each head of q and k has one. Embeddings are scaled,
and the MLP is a GeGLU. Most layers slide, with a rope of their own. Every sixth sees all positions, with a rope of a
longer base that may be scaled.
"""

from specdec.model.archs.base import ModelConfig, read_common, read_rope, read_sliding

# The values that transformers takes for fields that a config leaves out; released configs leave most of them out.
DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}


def read_multimodal(config: dict) -> ModelConfig:
    """Return the `ModelConfig` of the text part of a `gemma3` config, tied as the outer config says."""
    tied = config.get("tie_word_embeddings", True)
    return read(config["text_config"] | {"tie_word_embeddings": tied})


def read(config: dict) -> ModelConfig:
    """Return the `ModelConfig` of a `gemma3_text` config; ValueError for soft-capped or bidirectional attention."""
    config = DEFAULTS | config
    if config.get("attn_logit_softcapping") is not None:
        raise ValueError("attn_logit_softcapping is not supported: transformers' Gemma 3 ignores it")
    if config.get("use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention is not supported: a target must be causal")
    layers, pattern = config["num_hidden_layers"], config["sliding_window_pattern"]
    types = ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(layers)]
    rope, local_rope = _ropes(config)
    return read_common(
        config | {"hidden_act": config["hidden_activation"], "rope_parameters": rope, "rope_scaling": None},
        local_rope=read_rope({"rope_parameters": local_rope}),
        qkv_bias=config.get("attention_bias", False),
        o_bias=config.get("attention_bias", False),
        qk_norm=True,
        norm_offset=True,
        sandwich_norms=True,
        attention_scale=config["query_pre_attn_scalar"] ** -0.5,
        embed_scale=config["hidden_size"] ** 0.5,
        logit_softcap=config.get("final_logit_softcapping"),
        **read_sliding(config, types),
    )


def _ropes(config: dict) -> tuple[dict, dict]:
    """`rope_parameters` of the full and of the sliding layers, given by layer type or in the older spelling."""
    by_type = config.get("rope_parameters") or {}
    full = {"rope_theta": config.get("rope_theta", 1e6)} | (by_type.get("full_attention") or {})
    sliding = {"rope_theta": config.get("rope_local_base_freq", 1e4)} | (by_type.get("sliding_attention") or {})
    return full | (config.get("rope_scaling") or {}), sliding


def is_vision(name: str) -> bool:
    """Return whether a tensor of `gemma3` belongs to the vision part."""
    return name.removeprefix("model.").startswith(("vision_tower.", "multi_modal_projector."))
