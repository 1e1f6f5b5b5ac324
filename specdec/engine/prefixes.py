"""The prefix cache: a prompt that begins like an earlier one is read from the first token that differs.

The cache holds copies of the target's keys and values, and of the features that a drafter absorbs. So rows can be
dropped at any time. A copy serves every prompt that shares its beginning, of any length. A longer prompt replaces the
copy of its own beginning, as in a chat of several turns. When memory is full, the least recently used copies go first.

vLLM and SGLang share the memory itself, in blocks and by a tree of tokens (RadixAttention, arXiv 2312.07104). Here rows
are contiguous, and copying tokens takes little time compared with reading them.
"""

from collections import abc
from dataclasses import dataclass

import torch
from torch import Tensor

LEAST = 32  # tokens that begin alike: fewer are read as fast


@dataclass(eq=False)
class Prefix:
    """Cached keys, values and features of a prompt of T tokens."""

    tokens: Tensor  # [T], on the CPU
    layers: list[Tensor]  # keys and values of each, [2,1,T,K,Dh]
    feats: Tensor | None  # [1,T,F]

    @property
    def bytes(self) -> int:
        """Memory of the tokens, the keys and values, and the features."""
        parts = self.layers if self.feats is None else [*self.layers, self.feats]
        return self.tokens.nbytes + sum(x.nbytes for x in parts)

    def shared(self, tokens: Tensor) -> int:
        """Return the number of first tokens that the prefix shares with tokens [T']."""
        most = min(len(tokens), len(self.tokens))
        return int((self.tokens[:most] == tokens[:most]).long().cumprod(0).sum())


class Prefixes:
    """Cached beginnings of prompts, of a limited number of bytes."""

    def __init__(self, budget: int):
        """Begin without prefixes. budget: bytes that all of them may take."""
        self.budget, self.bytes, self.least = budget, 0, LEAST
        self.by_start: dict[tuple[int, ...], list[Prefix]] = {}  # by their first tokens, the least that are shared
        self.used: dict[Prefix, None] = {}  # the one that was used last comes last

    def find(self, prompt: abc.Sequence[int]) -> tuple[Prefix, int] | None:
        """Return the prefix that shares the most tokens with a prompt, and how many; None for fewer than `least`.

        The prompt's last token is never shared, because its logits are needed.
        """
        some = self.by_start.get(tuple(prompt[: self.least]), [])
        if not some or len(prompt) <= self.least:
            return None
        tokens = torch.tensor(prompt[:-1])
        shared, place = max((prefix.shared(tokens), place) for place, prefix in enumerate(some))
        return some[place], shared

    def touch(self, prefix: Prefix) -> None:
        """Mark a prefix as the last one used."""
        self.used[prefix] = self.used.pop(prefix)

    def keep(self, prompt: abc.Sequence[int], layers: abc.Sequence[Tensor], feats: Tensor | None) -> None:
        """Copy what has been read of a prompt: keys and values [2,1,S,K,Dh] of each layer, S >= T; feats [1,S,F]."""
        if len(prompt) < self.least:
            return
        tokens, length = torch.tensor(prompt), len(prompt)
        some = {prefix: prefix.shared(tokens) for prefix in self.by_start.get(tuple(prompt[: self.least]), [])}
        if (whole := next((prefix for prefix, shared in some.items() if shared == length), None)) is not None:
            self.touch(whole)
            return
        copies = [layer[:, :, :length].clone() for layer in layers]
        new = Prefix(tokens, copies, None if feats is None else feats[:, :length].clone())
        if new.bytes > self.budget:
            return
        for prefix, shared in some.items():
            if shared == len(prefix.tokens):
                self._drop(prefix)
        while self.bytes + new.bytes > self.budget:
            self._drop(next(iter(self.used)))
        self.by_start.setdefault(tuple(prompt[: self.least]), []).append(new)
        self.used[new] = None
        self.bytes += new.bytes

    def _drop(self, prefix: Prefix) -> None:
        start = tuple(prefix.tokens[: self.least].tolist())
        self.by_start[start].remove(prefix)
        if not self.by_start[start]:
            del self.by_start[start]
        del self.used[prefix]
        self.bytes -= prefix.bytes
