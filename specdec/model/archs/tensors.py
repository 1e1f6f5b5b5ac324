"""Which tensors of a checkpoint are the target's, and by what name."""

import re


def text_name(name: str, config: dict) -> str:
    """The name in the Llama layout. In `gemma3` files the text model stands under `language_model`, in either order."""
    if config["model_type"] != "gemma3":
        return name
    return re.sub(r"^(language_model\.model|model\.language_model)\.", "model.", name).removeprefix("language_model.")


def set_aside(name: str, config: dict) -> bool:
    """Does a tensor that the target has no place for belong to a part that is none of it, and known by its name?

    Those are heads for multi-token prediction, which drafters read: `model.mtp_layers.*` (MiMo), `mtp.*` (Qwen), and
    as many layers behind the last as the config announces (DeepSeek, GLM); the eyes of `gemma3`; and the frequencies
    that old Llama files store.
    """
    if name.startswith(("model.mtp_layers.", "mtp.")) or name.endswith("rotary_emb.inv_freq"):
        return True
    if config["model_type"] == "gemma3":
        return name.removeprefix("model.").startswith(("vision_tower.", "multi_modal_projector."))
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    layers = config.get("num_hidden_layers", 0)
    return layer is not None and layers <= int(layer[1]) < layers + (config.get("num_nextn_predict_layers") or 0)
