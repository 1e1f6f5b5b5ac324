"""Qwen3 (dense): RMSNorm on each head of q and k before the rotary embedding; head_dim is its own field."""

from specdec.archs.base import ModelConfig, context_without_sliding, read_common


def read(config: dict) -> ModelConfig:
    bias = config.get("attention_bias", False)
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    return read_common(
        config,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        head_dim=config.get("head_dim", 128),
        context=context_without_sliding(config, window),
    )
