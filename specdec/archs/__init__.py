"""Architectures: from a Hugging Face config to our `ModelConfig`, one small file per family.

A family file defines `read(config: dict) -> ModelConfig`. Add a file and name it in FAMILIES, and the family loads.
"""

from collections.abc import Callable

from specdec.archs import llama, mistral, qwen2, qwen3
from specdec.archs.base import ModelConfig, read_rope, rope_fields

FAMILIES: dict[str, Callable[[dict], ModelConfig]] = {
    "llama": llama.read,
    "mistral": mistral.read,
    "qwen2": qwen2.read,
    "qwen3": qwen3.read,
}


def read_config(config: dict, name: str) -> ModelConfig:
    """The parsed `config.json` of the checkpoint `name` -> ModelConfig; refuses what we would have to approximate."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"{name}: model family {family!r} is not supported; supported are {', '.join(FAMILIES)}")
    if config.get("quantization_config"):
        raise ValueError(f"{name}: quantised checkpoints are not supported; load the unquantised weights")
    try:
        return FAMILIES[family](config)
    except KeyError as error:
        raise ValueError(f"{name}: config.json lacks the field {error}") from None
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


__all__ = ["FAMILIES", "ModelConfig", "read_config", "read_rope", "rope_fields"]
