"""The interface of a target: what `target.Target` and `hf_target.TransformersTarget` have in common."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from specdec.model.archs import ModelConfig
from specdec.model.cache import KVCache


class LanguageModel(Protocol):
    """The interface of a target or of a draft model, as `Target` and `hf_target.TransformersTarget` implement it.

    `Target` and `TransformersTarget` describe each member in full.
    """

    name: str
    tokenizer: Any  # of transformers; None if it was not loaded
    eos: frozenset[int]
    config: ModelConfig
    capturable: bool
    masks_prompts: bool
    experts: int

    @property
    def chains_only(self) -> bool:
        """True if recurrent states rule out trees with siblings."""

    @property
    def reads_on(self) -> bool:
        """True if a prompt can be read in parts."""

    @property
    def embed(self) -> nn.Embedding:
        """Token embedding [V,H]."""

    @property
    def head(self) -> nn.Linear:
        """Output projection [V,H]."""

    @property
    def device(self) -> torch.device:
        """Device of the embedding and of the cache."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""

    @property
    def vocab(self) -> int:
        """Vocabulary size V."""

    @property
    def query_heads(self) -> int:
        """Number of query heads per layer."""

    @property
    def cache_shape(self) -> tuple[int, int]:
        """Shape (K, Dh) of a layer's keys and values per token."""

    __call__: Callable[..., Any]  # `forward`

    def final_scale(self) -> Tensor:
        """Return the root mean square of a hidden state after the final norm."""

    def final_gain(self) -> Tensor:
        """Return the factor [H] that the final norm applies to a normalised state."""

    def chosen_experts(self) -> list[Tensor]:
        """Return, per layer with experts, those of the last forward [tokens, experts of a token]."""

    def new_cache(self, rows: int, slots: int) -> KVCache:
        """Return an empty cache of `rows` rows of `slots` positions."""

    def cache_bytes(self, rows: int, slots: int) -> int:
        """Return the bytes that `new_cache` will take."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """See `nn.Module.parameters`."""

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        """See `nn.Module.buffers`."""

    def modules(self, remove_duplicate: bool = True) -> Iterator[nn.Module]:
        """See `nn.Module.modules`."""

    def eval(self) -> Self:
        """See `nn.Module.eval`."""

    def float(self) -> Self:
        """See `nn.Module.float`."""

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """See `nn.Module.to`."""
