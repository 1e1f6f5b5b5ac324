"""Qwen2 and 2.5: biases on q, k and v, none elsewhere."""

from specdec.model.archs.base import ModelConfig, read_common, read_qwen_sliding


def read(config: dict) -> ModelConfig:
    """Return the `ModelConfig` of a Qwen2 or 2.5 config."""
    return read_common(config, qkv_bias=True, **read_qwen_sliding(config))
