"""Mistral: Llama without biases; the first releases attend to a sliding window of 4096."""

from specdec.archs.base import ModelConfig, context_without_sliding, read_common


def read(config: dict) -> ModelConfig:
    return read_common(config, context=context_without_sliding(config, config.get("sliding_window")))
