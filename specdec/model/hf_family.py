"""What the config of a transformers model states, and whether the model is exact with our cache."""

from copy import copy

import torch
from torch import Tensor, nn
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
    config = copy(config)
    for field in ("sliding_window", "attention_chunk_size"):
        if not hasattr(type(config), field) and hasattr(config, field):
            setattr(config, field, None)  # the family has no windows: only transformers' cache would read the field
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


def is_experts(module: nn.Module) -> bool:
    """Return whether a module of transformers holds the experts of a layer."""
    return type(module).__name__.endswith("Experts")


class ExpertWatch:
    """Records the experts that every mixture layer chose in the last forward.

    transformers' mixtures give the chosen experts' numbers to one module that holds all experts of a layer.
    """

    def __init__(self, model: nn.Module):
        """Add a hook to each module of experts in `model`."""
        self.chosen: list[Tensor] = []  # by layer, [tokens, experts of a token]
        for module in filter(is_experts, model.modules()):
            module.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        given = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        self.chosen += [x for x in given if not x.is_floating_point()][:1]

    def clear(self) -> None:
        """Forget the chosen experts; call it before a forward."""
        self.chosen = []


TREE = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]
CHAIN = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]


@torch.inference_mode()
def check(target) -> None:
    """Raise ValueError unless a tree (a chain, if the model takes no trees) has the logits of the plain texts.

    A tree over rows of two lengths is verified, and then a token after part of it was committed. This takes a few
    forwards of a few tokens.
    """
    device, family = target.device, target.model.config.model_type
    ids = (torch.arange(16, device=device) * 31 + 7).remainder(target.config.vocab).view(2, 8)
    prompts, nodes, lens = ids[:, :4], ids[:, 4:], torch.tensor([4, 2], device=device)
    shape, paths, accepted = (CHAIN, ([0, 1], [0, 1, 2]), 2) if target.chains_only else (TREE, ([0, 1], [0, 2, 3]), 3)
    ancestors = torch.tensor(shape, device=device).bool().expand(2, 4, 4)
    depth = ancestors.long().sum(-1) - 1
    path = torch.tensor(paths[1], device=device).expand(2, -1)
    cache = target.new_cache(2, 16)
    target(prompts, cache)
    cache.advance(lens, 4)
    tree, _ = target(nodes, cache, depth=depth, ancestors=ancestors)
    cache.commit(path, torch.tensor([3, accepted], device=device), 7)
    after, _ = target(prompts[:, :1], cache)
    for row, (length, count) in enumerate(((4, 3), (2, accepted))):
        prompt = prompts[row, :length]
        short = plain(target, torch.cat([prompt, nodes[row, paths[0]]]))
        whole = plain(target, torch.cat([prompt, nodes[row, path[row]]]))
        long = plain(target, torch.cat([prompt, nodes[row, path[row, :count]], prompts[row, :1]]))
        expected = torch.stack([short, whole, long])
        difference = (
            (torch.stack([tree[row, 1], tree[row, paths[1][-1]], after[row, 0]]).float() - expected).abs().max()
        )
        # The tolerance is for rounding, as a share of the range of the logits. A mask or a position that the model
        # ignores makes a larger difference, and NaN must fail too.
        tolerance = 1e-3 if target.dtype == torch.float32 else 0.1
        if not difference <= tolerance * (expected.max() - expected.min()):
            what = "chain" if target.chains_only else "tree"
            raise ValueError(
                f"model family {family!r} cannot verify {what}s: its logits in a {what} differ from the plain text's "
                f"by {difference:.2g}"
            )


def plain(target, text: torch.Tensor) -> torch.Tensor:
    """Return the last logits [V] of a text [T], by the model alone."""
    return target.model(input_ids=text[None], use_cache=False).logits[0, -1].float()
