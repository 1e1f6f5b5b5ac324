"""Architectures: from a Hugging Face config to our `ModelConfig`.

In a checkpoint of `*ForConditionalGeneration`, which has `text_config` in its config, the language model is a part. Its
tensors are under `language_model.model.` (older files) or `model.language_model.` (newer ones), or have their usual
names (Qwen2-VL). All others belong to vision or audio and are ignored: the loaded model reads and writes text only.
"""

import re

from specdec.model.archs.base import ModelConfig, NotNative
from specdec.model.archs.families import FAMILIES
from specdec.model.config_fields import check_config

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


def read_config(config: dict, name: str) -> ModelConfig:
    """Return the `ModelConfig` of the checkpoint `name` from its parsed `config.json`.

    If the config wraps a language model, its inner config is read.

    Raises:
        NotNative: Our decoder would have to approximate the model; transformers may run it exactly.
        ValueError: The config is wrong.
    """
    family = config.get("model_type")
    if not (isinstance(family, str) and family in FAMILIES):  # a native family that wraps reads its config itself
        config = text_config(config)
        family = config.get("model_type")
    check_config(config, f"{name}: config.json", native=isinstance(family, str) and family in FAMILIES)
    if config.get("quantization_config"):
        raise NotNative("a quantised checkpoint is not native")
    if not isinstance(family, str) or family not in FAMILIES:
        raise NotNative(f"model family {family!r} is not native")
    try:
        return FAMILIES[family].read(config)
    except KeyError as error:
        raise ValueError(f"{name}: config.json lacks the field {error}") from None
    except NotNative:
        raise
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    except (TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{name}: a field of config.json has a value that cannot be: {error}") from None
