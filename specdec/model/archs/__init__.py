"""Architectures: from a Hugging Face config to our `ModelConfig`, one small file per family.

A family file defines `read(config: dict) -> ModelConfig`. Add a file and name it in FAMILIES, and the family loads.
"""

from collections.abc import Callable

from specdec.model.archs import gemma3, llama, mimo, mistral, qwen2, qwen3
from specdec.model.archs.base import ModelConfig, NotNative, read_rope, rope_fields

FAMILIES: dict[str, Callable[[dict], ModelConfig]] = {
    "llama": llama.read,
    "mistral": mistral.read,
    "qwen2": qwen2.read,
    "qwen3": qwen3.read,
    "mimo": mimo.read,
    "gemma3_text": gemma3.read,
    "gemma3": gemma3.read_multimodal,
}


def read_config(config: dict, name: str) -> ModelConfig:
    """The parsed `config.json` of the checkpoint `name` -> ModelConfig.

    Raises NotNative for what we would have to approximate and transformers may do, another ValueError for a config that
    is wrong.
    """
    family = config.get("model_type")
    if config.get("quantization_config"):
        raise ValueError(f"{name}: quantised checkpoints are not supported; load the unquantised weights")
    if family not in FAMILIES:
        raise NotNative(f"model family {family!r} is not native")
    try:
        return FAMILIES[family](config)
    except KeyError as error:
        raise ValueError(f"{name}: config.json lacks the field {error}") from None
    except NotNative:
        raise
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


__all__ = ["FAMILIES", "ModelConfig", "NotNative", "read_config", "read_rope", "rope_fields"]
