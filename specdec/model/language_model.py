"""The interface of a target or of a draft model: what `Target` and `hf_target.TransformersTarget` have in common."""

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from specdec.model.archs import ModelConfig
from specdec.model.cache import KVCache
from specdec.model.layers import Copyable


class LanguageModel(Copyable):
    """A decoder-only language model whose every forward runs over a KVCache (`Target.forward` describes it).

    The loader sets `name`, `tokenizer` and `eos`.
    """

    name: str = ""
    tokenizer: Any = None  # of transformers; None if it was not loaded
    eos: frozenset[int] = frozenset()
    config: ModelConfig
    embed: nn.Embedding  # [V,H]
    head: nn.Linear  # [V,H]
    cache_shape: tuple[int, int]  # (K, Dh) of a layer's keys and values per token
    capturable = False  # by CUDA graphs; see `specdec.engine.graphs`
    masks_prompts = False  # a prefill needs a mask of T x T for each row
    chains_only = False  # recurrent states, which know one text, rule out trees with siblings
    reads_on = True  # a prompt can be read in parts
    experts = 0  # per mixture layer; 0 for a dense model

    @override
    def __repr__(self) -> str:
        config, dtype = self.config, str(self.dtype).removeprefix("torch.")
        sizes = f"{config.layers} layers, hidden size {config.hidden}, {config.vocab} tokens"
        return f"{type(self).__name__}({str(self.name)!r}, {sizes}, {dtype} on {self.device})"

    @property
    def device(self) -> torch.device:
        """Return the device of the embedding and of the cache."""
        return self.embed.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the weights."""
        return self.embed.weight.dtype

    @property
    def vocab(self) -> int:
        """Return V, the number of tokens."""
        return self.config.vocab

    @property
    def query_heads(self) -> int:
        """Return the number of query heads per layer."""
        return self.config.heads

    def final_gain(self) -> Tensor:
        """Return the factor [H] that the final norm applies to a normalised state."""
        raise NotImplementedError

    def norm_gain(self) -> Tensor:
        """Return the factor [H] of the final norm's own weight. Raises ValueError if it is not known."""
        return self.final_gain()

    def final_scale(self) -> Tensor:
        """Return the root mean square of a hidden state after the final norm, as the norm's weights set it."""
        return self.final_gain().square().mean().sqrt()

    def chosen_experts(self) -> list[Tensor]:
        """Return, per layer with experts, those of the last forward [tokens, experts of a token]."""
        return []

    def new_cache(self, rows: int, slots: int) -> KVCache:
        """Return an empty cache of `rows` rows of `slots` positions; the forwards over it use the present weights."""
        raise NotImplementedError

    def cache_bytes(self, rows: int, slots: int) -> int:
        """Return the bytes that `new_cache` will take."""
        raise NotImplementedError
