"""Architectures: from a Hugging Face config to our `ModelConfig`."""

from specdec.model.archs.base import Architecture, ModelConfig, NotNative, read_rope, rope_fields
from specdec.model.archs.families import FAMILIES
from specdec.model.archs.wrapped import text_config
from specdec.model.config_fields import check_config


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


__all__ = ["FAMILIES", "Architecture", "ModelConfig", "NotNative", "read_config", "read_rope", "rope_fields"]
