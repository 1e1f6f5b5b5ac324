"""Qwen3 (dense): RMSNorm on each head of q and k before the rotary embedding; head_dim is its own field."""

from specdec.model.archs.base import ModelConfig, read_common, read_qwen_sliding


def read(config: dict) -> ModelConfig:
    """Return the `ModelConfig` of a dense Qwen3 config."""
    bias = config.get("attention_bias", False)
    return read_common(
        config,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        head_dim=config.get("head_dim", 128),
        **read_qwen_sliding(config),
    )
