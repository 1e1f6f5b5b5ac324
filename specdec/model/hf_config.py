"""What the config of a transformers model says about its attention: windows, and how far it is exact."""

from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

# Frequencies that depend on the length of the text. Up to the original context they are constant.
LENGTH_DEPENDENT_ROPES = ("dynamic", "longrope")


def read_windows(config: PretrainedConfig) -> dict[str, int | None]:
    """The window of each type of layer; None for attention to all positions.

    Raises ValueError for a family with other layers than attention, or with a mask that we cannot replace.
    """
    family, layers = config.model_type, DynamicCache(config=config).layers
    windows: dict[str, int | None] = {}
    for kind, layer in zip(getattr(config, "layer_types", None) or [""] * len(layers), layers, strict=True):
        window = getattr(layer, "sliding_window", None)
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) or windows.setdefault(kind, window) != window:
            raise ValueError(f"model family {family!r} cannot verify trees: it has layers that are no plain attention")
    if "local" in getattr(config, "attention_layers", ()):
        raise ValueError(f"model family {family!r} cannot verify trees: its local layers mask by themselves")
    return windows


def exact_context(config: PretrainedConfig) -> int:
    """The longest text over which the windows hold and the rotary frequencies are constant."""
    context = getattr(config, "max_position_embeddings", None) or 2048
    # Attention in chunks is attention to all positions within the first of them.
    context = min(context, read_windows(config).get("chunked_attention") or context)
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in [ropes] if "rope_type" in ropes else ropes.values():
        if rope and rope.get("rope_type") in LENGTH_DEPENDENT_ROPES:
            context = min(context, rope.get("original_max_position_embeddings") or context)
    return context
