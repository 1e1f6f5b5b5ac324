"""Mistral: Llama without biases; the first releases attend to a sliding window of 4096 in every layer."""

from specdec.model.archs.base import ModelConfig, read_common, read_sliding


def read(config: dict) -> ModelConfig:
    # transformers' Mistral ignores `layer_types`, and has a window unless the config says null.
    fields = {"sliding_window": 4096} | config | {"layer_types": None}
    return read_common(config, **read_sliding(fields, ["sliding_attention"] * config["num_hidden_layers"]))
