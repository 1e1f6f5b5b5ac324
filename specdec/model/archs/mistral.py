"""Mistral: Llama without biases; the first releases attend to a sliding window of 4096 in every layer.

With `layer_types` transformers treats it as Ministral, with sliding windows in the layers that it names.
"""

from specdec.model.archs.base import ModelConfig, read_common, read_sliding


def read(config: dict) -> ModelConfig:
    """Return the `ModelConfig` of a Mistral config; a config without `sliding_window` has a window of 4096."""
    fields = {"sliding_window": 4096} | config  # there is a window unless the config says null
    kind = "full_attention" if fields["sliding_window"] is None else "sliding_attention"
    return read_common(config, **read_sliding(fields, [kind] * config["num_hidden_layers"]))
