"""Qwen2 and 2.5: biases on q, k and v, none elsewhere."""

from specdec.archs.base import ModelConfig, context_without_sliding, read_common


def read(config: dict) -> ModelConfig:
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    return read_common(config, qkv_bias=True, context=context_without_sliding(config, window))
