"""Llama 2 and 3: plain projections, with biases only if the config says so."""

from specdec.model.archs.base import ModelConfig, NotNative, read_common


def read(config: dict) -> ModelConfig:
    """Return the `ModelConfig` of a Llama 2 or 3 config; raise NotNative for layers that slide."""
    if config.get("layer_types") not in (None, ["full_attention"] * config["num_hidden_layers"]):
        raise NotNative("a Llama with layer_types is not native")
    bias = config.get("attention_bias", False)
    return read_common(config, qkv_bias=bias, o_bias=bias, mlp_bias=config.get("mlp_bias", False))
