"""Checkpoints in which the language model is a part: `*ForConditionalGeneration`, with `text_config` in the config.

The language model's tensors are under `language_model.model.` (older files) or `model.language_model.` (newer ones),
or have their usual names (Qwen2-VL). All others belong to vision or audio and are ignored: the loaded model reads and
writes text only.
"""

import re

from specdec.model.archs.families import FAMILIES

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


def text_name(name: str, config: dict) -> str:
    """Return the name of a tensor in the Llama layout; config is that of a native family, or of one that wraps it."""
    return name if config["model_type"] in FAMILIES and not is_wrapped(config) else inner_name(name)


def set_aside(name: str, config: dict) -> bool:
    """Return whether a tensor without a place in the target is known to belong to another part of the model.

    Such parts are heads for multi-token prediction, which drafters read: `model.mtp_layers.*` (MiMo), `mtp.*` (Qwen),
    and the layers after the last that the config announces (DeepSeek, GLM). Others are the frequencies that old
    Llama files store, and what the family itself ignores. The family may be one that is not native. If a model wraps
    another one, all tensors outside the inner model belong to such a part.
    """
    if is_wrapped(config) and config["model_type"] not in FAMILIES:
        if "language_model." not in name and not name.startswith(TEXT):
            return True
        name, config = inner_name(name), text_config(config)
    if name.startswith(("model.mtp_layers.", "mtp.")) or name.endswith("rotary_emb.inv_freq"):
        return True
    family = FAMILIES.get(config["model_type"])
    if family is not None and family.set_aside(name):
        return True
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    layers = config.get("num_hidden_layers", 0)
    return layer is not None and layers <= int(layer[1]) < layers + (config.get("num_nextn_predict_layers") or 0)
