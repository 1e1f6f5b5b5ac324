"""Windows and exact context of a transformers model, as its config states them."""

from transformers import DynamicCache, PretrainedConfig, cache_utils
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

# Frequencies that depend on the length of the text. Up to the original context they are constant.
LENGTH_DEPENDENT_ROPES = ("dynamic", "longrope")


# Cache layers of transformers that attend, to all positions or to a window; some are recurrent too.
ATTENTION = (DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionAndFullAttentionLayer)
# Layers that do not attend, and their types if they must have one; some versions have no dummies.
DUMMY = getattr(cache_utils, "DummyLayer", None)
WITHOUT = {DUMMY: ("moe", "mlp"), LinearAttentionLayer: None}


def read_windows(config: PretrainedConfig) -> dict[str, int | None]:
    """Return the window of each type of attention layer; None for attention to all positions.

    Raises ValueError for a family with layers of another kind, or with a mask that we cannot replace.
    """
    family, layers = config.model_type, DynamicCache(config=config).layers
    windows: dict[str, int | None] = {}
    for kind, layer in zip(getattr(config, "layer_types", None) or [""] * len(layers), layers, strict=True):
        if type(layer) in WITHOUT and kind in (WITHOUT[type(layer)] or [kind]):
            continue
        window = getattr(layer, "sliding_window", None)
        if type(layer) not in ATTENTION or windows.setdefault(kind, window) != window:
            raise ValueError(
                f"model family {family!r} is not supported: it has layers of a kind that we do not know, {kind!r}"
            )
    if "local" in getattr(config, "attention_layers", ()):
        raise ValueError(f"model family {family!r} cannot verify trees: its local layers mask by themselves")
    return windows


def exact_context(config: PretrainedConfig) -> int:
    """Return the longest text over which the windows hold and the rotary frequencies are constant."""
    context = getattr(config, "max_position_embeddings", None) or 2048
    # Attention in chunks is attention to all positions within the first of them.
    context = min(context, read_windows(config).get("chunked_attention") or context)
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in [ropes] if "rope_type" in ropes else ropes.values():
        if rope and rope.get("rope_type") in LENGTH_DEPENDENT_ROPES:
            context = min(context, rope.get("original_max_position_embeddings") or context)
    return context


def count_experts(config: PretrainedConfig) -> int:
    """Return the number of experts per mixture layer; 0 for a dense model."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((n for n in (getattr(config, name, None) for name in names) if isinstance(n, int) and n > 1), 0)
