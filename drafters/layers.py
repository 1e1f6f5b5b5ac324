"""What drafters are made of: the shape of a draft layer, a head that is shared, fresh weights."""

import inspect
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from specdec.contracts import Drafter, DraftState, Features
from specdec.drafters.vocab import DraftVocab
from specdec.model.archs import ModelConfig
from specdec.model.archs.base import rope_fields
from specdec.model.attention import Attend, Attention
from specdec.model.cache import KVCache, cache_bytes
from specdec.model.layers import GatedMLP, LinearMap, RMSNorm, check_heads, freeze
from specdec.model.rope import Rope, RopeTable


@dataclass(frozen=True)
class DraftShape:
    """The shape of a draft layer. `hidden` is the draft's own, and the width of the target's embeddings."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope: Rope
    context: int = 2048

    def __post_init__(self) -> None:
        """Raise ValueError if the number of heads is not a multiple of the number of key-value heads."""
        check_heads(self.heads, self.kv_heads)


def shape_like(
    target,
    *,
    intermediate_size: int | None = None,
    num_attention_heads: int | None = None,
    num_key_value_heads: int | None = None,
    rope_theta: float | None = None,
) -> DraftShape:
    """The shape of a fresh drafter for a target; what is not given is the target's, its rope included."""
    config = target.config
    heads = num_attention_heads or config.heads
    return DraftShape(
        hidden=config.hidden,
        intermediate=intermediate_size or config.intermediate,
        heads=heads,
        kv_heads=num_key_value_heads or min(config.kv_heads, heads),
        head_dim=config.head_dim,
        eps=config.eps,
        rope=config.rope if rope_theta is None else Rope(rope_theta),
        context=config.context,
    )


def shape_fields(shape: DraftShape) -> dict:
    """The fields of a config.json that state the shape; `formats.parts.read_shape` reads them back."""
    return {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.eps,
        "max_position_embeddings": shape.context,
        "tie_word_embeddings": False,
        **rope_fields(shape.rope),
    }


def split_sizes(target, settings: Mapping[str, Any], **sizes) -> tuple[DraftShape, dict[str, Any]]:
    """Split the settings of a `create` function into the shape that `shape_like` makes of its sizes, and the rest."""
    names = inspect.signature(shape_like).parameters
    given = {name: value for name, value in settings.items() if name in names}
    return shape_like(target, **sizes, **given), {k: v for k, v in settings.items() if k not in given}


def start(drafter: Drafter, target: Any, init: str) -> None:
    """Initialise a drafter with random fp32 weights on the target's device.

    With `init` 'target', `start_from` then lets it repeat the target's prediction of one token earlier. 'random' does
    not.
    """
    if init not in ("target", "random"):
        raise ValueError(f"init must be 'target' or 'random', got {init!r}")
    drafter.to(target.device)
    with torch.no_grad():
        for module in drafter.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        if init == "target":
            drafter.start_from(target)


class DraftLayer(nn.Module):
    """A pre-norm decoder layer."""

    def __init__(self, shape: DraftShape, attention: Attention):
        """Build the norms and a gated MLP around `attention`."""
        super().__init__()
        self.input_norm = RMSNorm(shape.hidden, shape.eps)
        self.attention = attention
        self.post_norm = RMSNorm(shape.hidden, shape.eps)
        self.mlp = GatedMLP(shape.hidden, shape.intermediate)

    @override
    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        x, normed = self.attention.add(x, self.input_norm(x), self.post_norm, rope, attend)
        return x + self.mlp(normed)


class SharedHead(LinearMap):
    """Rows of a head that is not the drafter's to train: logits over its draft vocabulary."""

    def __init__(self, weight: Tensor, ids: Tensor | None):
        """Keep the rows `ids` [U] of weight [V,H], or, if `ids` is None, share all of them without a copy."""
        super().__init__()
        rows = weight.detach() if ids is None else weight.detach()[ids.to(weight.device)]
        self.register_buffer("weight", rows, persistent=False)
        self.bias = None


class SumHead:
    """Heads without biases over the parts of one input, whose logits are added. For training."""

    bias = None

    def __init__(self, *heads: LinearMap):
        """heads: of widths [U,H1], [U,H2], ..."""
        self.heads = heads

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """Return the weights of all heads."""
        return tuple(weight for head in self.heads for weight in head.weights)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the summed logits [...,U] of the parts of x [...,H1+H2+...]."""
        first, *others = self.parts(x)
        return sum(others, first)

    def parts(self, x: Tensor) -> list[Tensor]:
        """[...,H1+H2+...] -> what is added, [...,U] each."""
        parts = x.split([head.weight.shape[1] for head in self.heads], -1)
        return [F.linear(part.to(head.weight), head.weight) for head, part in zip(self.heads, parts, strict=True)]


def mask_row(token: int | None, embedding: Tensor) -> int:
    """The mask token, which None leaves to the last row of an embedding. Raises ValueError for one without a row."""
    row = len(embedding) - 1 if token is None else token
    if not 0 <= row < len(embedding):
        raise ValueError(f"mask_token must be a row of the target's embedding, 0 to {len(embedding) - 1}, got {row}")
    return row


class CachedDrafter(Drafter):
    """A drafter with a head and a cache. A subclass says how it absorbs committed positions (`absorb`)."""

    cache: KVCache
    vocab: DraftVocab
    shape: DraftShape | ModelConfig
    head: LinearMap
    embedding: Tensor  # [V,H]
    rope: RopeTable
    depth: int  # layers with keys and values
    spare = 0  # cache slots in addition to those of the text
    capturable = True
    learns = True

    @override
    def reset(self, rows: int, slots: int) -> None:
        shape, slots = self.shape, slots + self.spare
        freeze(self)
        self.rope.reserve(slots, self.embedding)
        self.cache = KVCache(self.depth, rows, slots, shape.kv_heads, shape.head_dim, like=self.embedding).clear(0)

    @override
    def cache_bytes(self, rows: int, slots: int) -> int:
        shape = self.shape
        return cache_bytes(self.depth, rows, slots + self.spare, shape.kv_heads, shape.head_dim, like=self.embedding)

    @abstractmethod
    def absorb(
        self, cache: KVCache, feats: Features, tokens: Tensor, n: Tensor, max_len: int, prefill: bool = False
    ) -> DraftState:
        """Do what `extend` says, in `cache`, which `prefill` says holds nothing yet."""

    @override
    def heads_in_use(self) -> list[LinearMap]:
        return [self.head]

    @override
    def set_heads(self, heads: list[LinearMap]) -> None:
        (self.head,) = heads

    @override
    def admit(self, row: int, first: Tensor, feats: Features, tokens: Tensor, n: Tensor) -> DraftState:
        part = self.cache.admit(row, len(first), tokens.shape[1])
        return self.absorb(part, feats, tokens, n, tokens.shape[1], prefill=True)

    @override
    def extend(self, feats: Features, tokens: Tensor, n: Tensor, max_len: int) -> DraftState:
        return self.absorb(self.cache, feats, tokens, n, max_len)


def restrict(drafter: Drafter, ids: Tensor) -> None:
    """Let a drafter with heads propose only the target tokens `ids` [U'], in this order (FR-Spec, arXiv 2502.14856).

    Tokens that it could not propose before are left out. Verification and emitted tokens do not change.
    """
    old, heads = drafter.vocab, drafter.heads_in_use()
    if not heads:
        raise ValueError(f"{type(drafter).__name__} has no head that a token map could cut")
    ids = ids.to(heads[0].weight.device)
    DraftVocab(old.target_size, ids)  # which checks the ids
    rows = old.from_target(ids.long())
    rows = rows[rows >= 0]
    if not len(rows):
        raise ValueError("the token map and the drafter's own vocabulary have no token in common")
    drafter.set_heads([SharedHead(head.weight, rows) for head in heads])
    drafter.vocab = DraftVocab(old.target_size, old.to_target(rows))
