"""The tensors of a checkpoint that belong to the target, and their names."""

import re

from specdec.model.archs import FAMILIES
from specdec.model.archs.wrapped import inner_name, is_text, is_wrapped, text_config


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
        if not is_text(name):
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
