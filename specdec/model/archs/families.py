"""The native families: what a Hugging Face config of each says about our decoder."""

from specdec.model.archs.base import Architecture, ModelConfig, NotNative, read_common, read_rope, read_sliding


def read_llama(config: dict) -> ModelConfig:
    """Return the `ModelConfig` of a Llama 2 or 3 config; raise NotNative for layers that slide."""
    if config.get("layer_types") not in (None, ["full_attention"] * config["num_hidden_layers"]):
        raise NotNative("a Llama with layer_types is not native")
    return read_common(config, **_biases(config), mlp_bias=config.get("mlp_bias", False))


def read_mistral(config: dict) -> ModelConfig:
    """Return the `ModelConfig` of a Mistral config, a Llama without biases.

    The first releases attend to a sliding window of 4096 in every layer, and their configs need not say so. With
    `layer_types` transformers treats Mistral as Ministral, with sliding windows in the layers that it names.
    """
    fields = {"sliding_window": 4096} | config  # there is a window unless the config says null
    kind = "full_attention" if fields["sliding_window"] is None else "sliding_attention"
    return read_common(config, **read_sliding(fields, [kind] * config["num_hidden_layers"]))


def read_qwen2(config: dict) -> ModelConfig:
    """Return the `ModelConfig` of a Qwen2 or 2.5 config: biases on q, k and v, none elsewhere."""
    return read_common(config, qkv_bias=True, **_qwen_sliding(config))


def read_qwen3(config: dict) -> ModelConfig:
    """Return the `ModelConfig` of a dense Qwen3 config, with RMSNorm on each head of q and k before the rotation."""
    head_dim = config.get("head_dim", 128)
    return read_common(config, **_biases(config), qk_norm=True, head_dim=head_dim, **_qwen_sliding(config))


def _biases(config: dict) -> dict:
    bias = config.get("attention_bias", False)
    return {"qkv_bias": bias, "o_bias": bias}


def _qwen_sliding(config: dict) -> dict:
    """As `read_sliding`: with `use_sliding_window`, layers from `max_window_layers` on slide."""
    fields = {"sliding_window": 4096} | config
    if not config.get("use_sliding_window"):
        if "sliding_attention" in (config.get("layer_types") or ()):
            raise ValueError("layer_types names sliding layers, but use_sliding_window is off")
        fields["sliding_window"] = None
    full, layers = config.get("max_window_layers", 28), config["num_hidden_layers"]
    slide = ["sliding_attention" if layer >= full else "full_attention" for layer in range(layers)]
    return read_sliding(fields, slide if fields["sliding_window"] is not None else ["full_attention"] * layers)


# The values that transformers takes for fields that a config leaves out; released configs leave most of them out.
GEMMA3 = {
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


def read_gemma3(config: dict) -> ModelConfig:
    """Return the `ModelConfig` of a `gemma3_text` config; ValueError for soft-capped or bidirectional attention.

    Norms store their weight less 1. Each block has four of them, and each head of q and k has one. Embeddings are
    scaled, and the MLP is a GeGLU. Most layers slide, with a rope of their own. Every sixth sees all positions, with a
    rope of a longer base that may be scaled. The ropes are given by layer type or in the older spelling.
    """
    config = GEMMA3 | config
    if config.get("attn_logit_softcapping") is not None:
        raise ValueError("attn_logit_softcapping is not supported: transformers' Gemma 3 ignores it")
    if config.get("use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention is not supported: a target must be causal")
    layers, pattern = config["num_hidden_layers"], config["sliding_window_pattern"]
    types = ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(layers)]
    by_type = config.get("rope_parameters") or {}
    rope = {"rope_theta": config.get("rope_theta", 1e6)} | (by_type.get("full_attention") or {})
    local = {"rope_theta": config.get("rope_local_base_freq", 1e4)} | (by_type.get("sliding_attention") or {})
    rope |= config.get("rope_scaling") or {}
    return read_common(
        config | {"hidden_act": config["hidden_activation"], "rope_parameters": rope, "rope_scaling": None},
        local_rope=read_rope({"rope_parameters": local}),
        **_biases(config),
        qk_norm=True,
        norm_offset=True,
        sandwich_norms=True,
        attention_scale=config["query_pre_attn_scalar"] ** -0.5,
        embed_scale=config["hidden_size"] ** 0.5,
        logit_softcap=config.get("final_logit_softcapping"),
        **read_sliding(config, types),
    )


def read_multimodal_gemma3(config: dict) -> ModelConfig:
    """Return the `ModelConfig` of the text part of a `gemma3` config, tied as the outer config says."""
    return read_gemma3(config["text_config"] | {"tie_word_embeddings": config.get("tie_word_embeddings", True)})


def is_vision(name: str) -> bool:
    """Return whether a tensor of `gemma3` belongs to the vision part."""
    return name.removeprefix("model.").startswith(("vision_tower.", "multi_modal_projector."))


FAMILIES = {
    "llama": Architecture(read_llama),
    "mistral": Architecture(read_mistral),
    "qwen2": Architecture(read_qwen2),
    "qwen3": Architecture(read_qwen3),
    "mimo": Architecture(read_qwen2),  # its files also hold heads for multi-token prediction
    "gemma3_text": Architecture(read_gemma3),
    "gemma3": Architecture(read_multimodal_gemma3, is_vision),
}
