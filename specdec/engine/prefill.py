"""Prompts that are read in parts, so that rows which run wait for a part and not for all of it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.engine.sequence import Sequence
from specdec.model.cache import KVCache
from specdec.model.target import Target


@dataclass
class Read:
    """What the target made of a prompt of one row."""

    cache: KVCache
    logits: Tensor  # [1,1,V] behind the last token
    feats: Tensor | None  # [1,T,F]


class Reading:
    """The prompt that is being read. It lies in a cache of its own until all of it is there. So rows may be dropped
    and join beside it. Only the target reads in parts: a drafter reads the whole prompt when the row joins."""

    def __init__(self, target: Target, cache: KVCache, taps: tuple[int, ...], most: int):
        """cache: that of the rows. most: tokens of a part."""
        self.target, self.cache, self.taps, self.most = target, cache.aside(), taps, most
        self.drop()

    def drop(self) -> None:
        """Forget the prompt."""
        self.sequence: Sequence | None = None
        self.done = 0  # tokens
        self.feats: list[Tensor] = []
        self.logits: Tensor | None = None

    def wants(self, sequence: Sequence) -> bool:
        """Is its prompt longer than a part, and not read yet?"""
        return len(sequence.prompt) > self.most and not (self.sequence is sequence and self.logits is not None)

    def read(self, sequence: Sequence) -> None:
        """Read the next part of a prompt, its first one if another was read before."""
        if self.sequence is not sequence:
            self.drop()
            self.sequence = sequence
            self.cache.clear(1)
        part = sequence.prompt[self.done : self.done + self.most]
        first, over = self.done == 0, self.done + len(part) == len(sequence.prompt)
        tokens = torch.tensor([part], device=self.cache.lens.device)
        n = torch.tensor([len(part)], device=tokens.device)
        itself = tokens.new_ones(1, 1, 1, dtype=torch.bool) if len(part) == 1 else None
        how = {"taps": self.taps, "last": n - 1, "logits": over, "prefill": first, "ancestors": itself}
        self.logits, feats = self.target(tokens, self.cache, **how)
        self.done += len(part)
        self.cache.advance(n, self.done)
        if feats is not None:
            self.feats.append(feats)

    def take(self, sequences: list[Sequence]) -> Read | None:
        """The prompt of the only one of these, if it has been read here. It is forgotten here."""
        if len(sequences) != 1 or sequences[0] is not self.sequence or self.logits is None:
            return None
        read = Read(self.cache, self.logits, torch.cat(self.feats, 1) if self.feats else None)
        self.drop()
        return read
