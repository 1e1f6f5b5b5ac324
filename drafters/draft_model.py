"""An independent small language model of the target's vocabulary as drafter (Leviathan et al., arXiv 2211.17192).

It reads tokens only, and keeps its own conventions: token t has position t, and from it token t+1 is predicted.
"""

import os

import torch
from torch import Tensor

from drafters.vocab import DraftVocab
from specdec.contracts import Drafter, DraftState
from specdec.model.cache import KVCache
from specdec.model.checkpoint import resolve
from specdec.model.loader import load_target
from specdec.model.target import Target

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


class DraftModel(Drafter):
    """Any model that can be a target, run over a cache of its own: committed tokens and, behind them, the tree."""

    def __init__(self, model: Target, vocab: DraftVocab | None = None):
        super().__init__()
        self.model, self.vocab = model, vocab or DraftVocab(model.vocab)

    @property
    def capturable(self) -> bool:
        return self.model.capturable

    def reset(self, batch: int, slots: int, first: Tensor) -> None:
        self.first = first
        self.cache = self.model.new_cache(batch, slots + 1)

    def cache_bytes(self, batch: int, slots: int) -> int:
        return self.model.cache_bytes(batch, slots + 1)

    def extend(self, feats: Tensor | None, tokens: Tensor, n: Tensor, max_len: int) -> DraftState:
        if self.cache.max_len == 0:  # token 0 goes in with the first ones: the whole prompt is one causal prefill
            tokens, n = torch.cat([self.first[:, None], tokens], 1), n + 1
        last = (n - 1).clamp(min=0)  # n is 0 for rows that are finished: their state does not matter
        logits, _ = self.model(tokens, self.cache, last=last)
        self.cache.advance(n, max_len + 1)
        return self._state(logits)

    def step(self, tokens: Tensor, hidden: Tensor, level: int, ancestors: Tensor) -> DraftState:
        behind = TreeLevel(self.cache, (level - 1) * tokens.shape[1])
        logits, _ = self.model(tokens, behind, depth=torch.full_like(tokens, level - 1), ancestors=ancestors)
        return self._state(logits)

    def _state(self, logits: Tensor) -> DraftState:
        nothing = logits.new_empty(*logits.shape[:2], 0)  # all that is remembered lies in the cache
        return DraftState(nothing, self.vocab.select(logits))


class TreeLevel:
    """The cache as one level of a tree sees it: its nodes go behind the `offset` nodes of the levels before.

    A model with sliding windows takes the levels before as close as this one; windows are longer than trees are deep.
    """

    def __init__(self, cache: KVCache, offset: int):
        self.cache, self.offset = cache, offset
        self.max_len = cache.max_len + offset

    def __getattr__(self, name: str):
        return getattr(self.cache, name)

    def slots_of(self, offsets: Tensor) -> Tensor:
        return self.cache.slots_of(self.offset + offsets)


def create(target, *, path: str | os.PathLike | None, vocab: DraftVocab | None = None) -> DraftModel:
    """The model of a checkpoint folder or hub name, in the target's dtype and on its device.

    Raises ValueError, one sentence, unless it is a model that we load and its tokens are the target's.
    """
    if path is None:
        raise ValueError("a draft model is a checkpoint of its own: give its folder or hub name as `path`")
    folder = resolve(path)
    tokenizer = target.tokenizer
    compare = tokenizer is not None and any((folder / name).is_file() for name in TOKENIZER_FILES)
    model = load_target(folder, device=str(target.device), tokenizer=compare)
    if model.vocab != target.vocab:
        raise ValueError(
            f"{path}: the draft model has a vocabulary of {model.vocab}, the target one of "
            f"{target.vocab}; they must be the same"
        )
    if compare and model.tokenizer.get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"{path}: the draft model's tokenizer names tokens differently from the target's; take a model of the "
            "target's family"
        )
    return DraftModel(model.to(target.dtype), vocab).eval()


def is_language_model(config: dict, tensors: dict[str, Tensor]) -> bool:
    """Is this checkpoint an ordinary causal language model? Heads that read a target's features have no embedding of
    this name."""
    named = (config.get("architectures") or [""])[0]
    return named.endswith("ForCausalLM") and "model.embed_tokens.weight" in tensors
