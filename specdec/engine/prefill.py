"""Prompts that are prefilled apart from the rows of the batch.

Long prompts are read in parts, so that running rows wait for a part only. Prompts that begin like earlier ones are read
from the first difference on.
"""

from collections import abc
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.engine.prefixes import Prefixes
from specdec.engine.sequence import Sequence
from specdec.model.cache import KVCache
from specdec.model.language_model import LanguageModel


@dataclass
class Read:
    """Result of the target for a prompt of one row."""

    cache: KVCache
    logits: Tensor  # [1,1,V] after the last token
    feats: Tensor | None  # [1,T,F]


class Reading:
    """The prompt that is being read.

    It has a cache of its own until it has been read completely, so rows may leave and join the batch meanwhile. Only
    the target reads in parts: a drafter reads the whole prompt when the row joins.
    """

    def __init__(
        self, target: LanguageModel, cache: KVCache, taps: tuple[int, ...], most: int, prefixes: Prefixes | None = None
    ):
        """cache: that of the rows. most: tokens of a part. prefixes: the prefix cache."""
        self.target, self.cache, self.taps, self.most = target, cache.scratch(), taps, most
        self.prefixes = prefixes
        self.drop()

    def drop(self) -> None:
        """Drop the prompt."""
        self.sequence: Sequence | None = None
        self.done = 0  # tokens
        self.feats: list[Tensor] = []
        self.logits: Tensor | None = None

    def apart(self, sequence: Sequence, several: bool) -> bool:
        """Return whether a prompt is read here: it is longer than a part, or begins like an earlier one.

        several: others could be read together with it, which is worth more than a small part of it.
        """
        if len(sequence.prompt) > self.most or self.sequence is sequence:
            return True
        found = None if self.prefixes is None else self.prefixes.find(sequence.prompt)
        return found is not None and (not several or 2 * found[1] >= len(sequence.prompt))

    def wants(self, sequence: Sequence, several: bool) -> bool:
        """Return whether the prompt is to be read here and has not been read yet."""
        return self.logits is None if self.sequence is sequence else self.apart(sequence, several)

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
        itself = tokens.new_ones(1, 1, 1, dtype=torch.bool) if len(part) == 1 else None
        how = {"taps": self.taps, "last": n - 1, "logits": over, "prefill": first, "ancestors": itself}
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

    def take(self, prompts: abc.Sequence[abc.Sequence[int]]) -> Read | None:
        """Return the target's result for the only one of these prompts, if it was read here, and drop it here."""
        own = None if self.sequence is None else self.sequence.prompt
        if len(prompts) != 1 or self.logits is None or prompts[0] is not own:
            return None
        read = Read(self.cache, self.logits, torch.cat(self.feats, 1) if self.feats else None)
        self.drop()
        return read
