"""Prompts that are prefilled apart from the rows of the batch.

Long prompts are read in parts, so that running rows wait for a part only. A prompt that begins like an earlier one is
read from the first token that differs. For that the prefix cache holds copies of the target's keys and values, and of
the features that a drafter absorbs. So rows can be dropped at any time. A copy serves every prompt that shares its
beginning, of any length. A longer prompt replaces the copy of its own beginning, as in a chat of several turns. When
memory is full, the least recently used copies go first.

vLLM and SGLang share the memory itself, in blocks and by a tree of tokens (RadixAttention, arXiv 2312.07104). Here rows
are contiguous, and copying tokens takes little time compared with reading them.
"""

from collections import abc
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.engine.sequence import Sequence
from specdec.model.cache import KVCache
from specdec.model.language_model import LanguageModel
from specdec.model.layers import weight_state

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
        self.weights: list[tuple[int, int]] = []  # the state of those that they were computed with

    def match(self, target: LanguageModel) -> None:
        """Drop all prefixes if the target's weights have changed since the last call."""
        weights = weight_state(target.parameters())
        if weights != self.weights:
            self.weights = weights
            for prefix in list(self.used):
                self._drop(prefix)

    def find(self, prompt: abc.Sequence[int]) -> tuple[Prefix, int] | None:
        """Return the prefix that shares the most tokens with a prompt, and how many; None for fewer than `least`."""
        some = self.by_start.get(tuple(prompt[: self.least]), [])
        if not some or len(prompt) <= self.least:
            return None
        tokens = torch.tensor(prompt[:-1])  # the logits after the last one are needed
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


class ChunkedPrefill:
    """Reads a prompt in parts, or from where a cached prefix ends.

    The prompt has a cache of its own until it has been read completely, so rows may leave and join the batch meanwhile.
    Only the target reads in parts: a drafter reads the whole prompt when the row joins.
    """

    def __init__(
        self, target: LanguageModel, cache: KVCache, taps: tuple[int, ...], most: int, prefixes: Prefixes | None = None
    ):
        """cache: that of the rows. most: tokens of a part. prefixes: the prefix cache."""
        self.target, self.cache, self.taps, self.most = target, cache.scratch(), taps, most
        self.prefixes = prefixes
        if prefixes is not None:
            prefixes.match(target)
        self.drop()

    def drop(self) -> None:
        """Drop the prompt."""
        self.sequence: Sequence | None = None
        self.done = 0  # tokens
        self.feats: list[Tensor] = []
        self.logits: Tensor | None = None

    def ready(self, waiting: list[Sequence]) -> tuple[list[Sequence], bool]:
        """Return which of the first waiting sequences join now, and whether a part of the first prompt was read.

        None joins while more of that prompt is to be read. A prompt that was read in parts joins alone.
        """
        first, several = waiting[0], len(waiting) > 1
        if read := self._wants(first, several):
            self.read(first)
            if self._wants(first, several):
                return [], True
        alone = next((place for place, s in enumerate(waiting) if self._apart(s, several)), len(waiting))
        return waiting[: max(alone, 1)], read

    def _apart(self, sequence: Sequence, several: bool) -> bool:
        """Return whether a prompt is read here: it is longer than a part, or begins like an earlier one.

        several: others could be read together with it, which is worth more than a small part of it.
        """
        if len(sequence.prompt) > self.most or self.sequence is sequence:
            return True
        found = None if self.prefixes is None else self.prefixes.find(sequence.prompt)
        return found is not None and (not several or 2 * found[1] >= len(sequence.prompt))

    def _wants(self, sequence: Sequence, several: bool) -> bool:
        """Return whether the prompt is to be read here and has not been read yet."""
        return self.logits is None if self.sequence is sequence else self._apart(sequence, several)

    def read(self, sequence: Sequence) -> None:
        """Read the next part of a prompt, its first one if another was read before."""
        if self.sequence is not sequence:
            self.drop()
            self.sequence = sequence
            self.cache.clear(1)
            self._begin(sequence)
        part = sequence.prompt[self.done : self.done + self.most]
        first, over = self.done == 0, self.done + len(part) == len(sequence.prompt)
        tokens = torch.tensor([part], device=self.cache.lens.device)
        n = torch.tensor([len(part)], device=tokens.device)
        how = {"taps": self.taps, "last": n - 1, "logits": over, "prefill": first}
        self.logits, feats = self.target(tokens, self.cache, **how)
        self.done += len(part)
        self.cache.advance(n, self.done)
        if feats is not None:
            self.feats.append(feats)

    def _begin(self, sequence: Sequence) -> None:
        """Begin with the cached beginning of another prompt, which need not be read."""
        found = None if self.prefixes is None else self.prefixes.find(sequence.prompt)
        if self.prefixes is None or found is None:
            return
        prefix, self.done = found
        self.prefixes.touch(prefix)
        self.cache.hold(prefix.layers, self.done)
        if prefix.feats is not None:
            self.feats.append(prefix.feats[:, : self.done])
        sequence.cached = self.done

    def keep(self, prompts: abc.Sequence[abc.Sequence[int]], rows: KVCache, feats: Tensor | None) -> None:
        """Store prompts that have been read in the prefix cache, if there is one: their rows, and feats [R,T,F]."""
        if self.prefixes is None:
            return
        for row, prompt in enumerate(prompts):
            of_row = None if feats is None else feats[row : row + 1]
            self.prefixes.keep(prompt, [layer[:, row : row + 1] for layer in rows.layers], of_row)

    def take(self, prompts: abc.Sequence[abc.Sequence[int]]) -> tuple[KVCache, Tensor, Tensor | None] | None:
        """Return cache, logits [1,1,V] after the last token, and feats [1,T,F] of the only prompt, and drop it here.

        Return None if there are several prompts, or if it was not read here.
        """
        own = None if self.sequence is None else self.sequence.prompt
        if len(prompts) != 1 or self.logits is None or prompts[0] is not own:
            return None
        read = self.cache, self.logits, torch.cat(self.feats, 1) if self.feats else None
        self.drop()
        return read
