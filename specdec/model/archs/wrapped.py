"""Checkpoints in which the language model is a part: `*ForConditionalGeneration`, with `text_config` in the config.

The language model's tensors are under `language_model.model.` (older files) or `model.language_model.` (newer ones),
or have their usual names (Qwen2-VL). All others belong to vision or audio and are ignored: the loaded model reads and
writes text only.
"""

import re

# Fields of the whole model that the outer config may have.
OUTER = ("architectures", "tie_word_embeddings", "quantization_config", "eos_token_id", "dtype", "torch_dtype")
INNER = re.compile(r"^(?:language_model\.model|model\.language_model)\.")
TEXT = ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.", "mtp.")


def is_wrapped(config: dict) -> bool:
    """Return whether the language model is a part of the model that this config.json describes."""
    return isinstance(config.get("text_config"), dict)


def text_config(config: dict) -> dict:
    """Return the language model's config from any parsed config.json."""
    if not is_wrapped(config):
        return config
    return config["text_config"] | {key: config[key] for key in OUTER if config.get(key) is not None}


def inner_name(name: str) -> str:
    """Return the name that a tensor of a wrapped checkpoint has in the language model alone."""
    return INNER.sub("model.", name).removeprefix("language_model.")


def is_text(name: str) -> bool:
    """Return whether a tensor of a wrapped checkpoint belongs to the language model."""
    return "language_model." in name or name.startswith(TEXT)
