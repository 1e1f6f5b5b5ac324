"""Batches in an order that depends on the seed alone: of similar lengths, or packed."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.training.data.render import Sample


@dataclass
class Batch:
    """Rows of conversations, padded on the right."""

    tokens: Tensor  # [B,T]
    loss_mask: Tensor  # [B,T] fp32, 1 for training tokens, 0 on padding
    documents: Tensor | None = None  # [B,T] the number of the conversation in its row; padding is one more
    weights: Tensor | None = None  # [B,T] how much each token counts, if samples say so
    rows: list[list[int]] | None = None  # the conversations of each row, by `Sample.number`
    packed: bool = False  # a row may hold several conversations


class Batches:
    """An endless, deterministic order of batches of at most `batch_tokens` padded tokens each; a longer text is alone.

    Without `pack` a row holds one conversation, and rows of similar lengths come together. With `pack` a row holds as
    many conversations, in random order, as fit into so many tokens.

    Packing changes no conversation's losses. An objective reads up to `lookahead` tokens ahead of a position, so at a
    conversation's end it reads the beginning of the next one, which must have no training tokens. A conversation with
    training tokens at its beginning therefore comes first in its row.

    Batch k of epoch e depends on (seed, e, k) alone, so a resumed run continues where it stopped.
    """

    POOL = 32  # so many batches' samples are sorted by length together

    def __init__(
        self, samples: list[Sample], batch_tokens: int, seed: int, pack: int | None = None, lookahead: int = 0
    ):
        """Store the samples. Raise ValueError if there are none, or if `pack` is too small or too large."""
        if not samples:
            raise ValueError("the data hold no conversation in which the assistant speaks")
        if pack is not None and not 1 <= pack <= batch_tokens:
            raise ValueError(f"data.pack must lie between 1 and trainer.batch_tokens={batch_tokens}, got {pack}")
        longest = max(len(s.ids) for s in samples)
        if pack is not None and longest > pack:
            raise ValueError(
                f"data.pack={pack} is shorter than the longest conversation of {longest} tokens: give a larger one, or "
                f"data.max_length={pack}"
            )
        self.samples, self.batch_tokens, self.seed = samples, batch_tokens, seed
        self.pack, self.lookahead = pack, lookahead

    def epoch(self, number: int) -> list[list[int]]:
        """The batches of one epoch, as lists of sample indices."""
        rng = np.random.default_rng([self.seed, number])
        order = rng.permutation(len(self.samples)).tolist()
        if self.pack is not None:
            return [[i for row in batch for i in row] for batch in self._pack(order, self.pack)]
        mean = sum(len(s.ids) for s in self.samples) / len(self.samples)
        pool = max(1, int(self.POOL * self.batch_tokens / mean))
        batches: list[list[int]] = []
        for start in range(0, len(order), pool):
            batches += self._cut(sorted(order[start : start + pool], key=lambda i: len(self.samples[i].ids)))
        rng.shuffle(batches)
        return batches

    def _cut(self, indices: list[int]) -> list[list[int]]:
        batches: list[list[int]] = [[]]
        for i in indices:  # in ascending order, so the newest is the longest
            if batches[-1] and (len(batches[-1]) + 1) * len(self.samples[i].ids) > self.batch_tokens:
                batches.append([])
            batches[-1].append(i)
        return batches

    def _pack(self, indices: list[int], length: int) -> list[list[list[int]]]:
        """Batches of rows of samples. Each sample goes into the first row of the newest batch that has room for it."""
        batches: list[list[list[int]]] = [[]]
        room: list[int] = []  # of the newest batch's rows
        for i in indices:
            sample = self.samples[i]
            fits = (r for r, free in enumerate(room) if len(sample.ids) <= free)
            row = None if sample.mask[: self.lookahead].any() else next(fits, None)
            if row is None:
                if (len(room) + 1) * length > self.batch_tokens:
                    batches.append([])
                    room = []
                row = len(room)
                room.append(length)
                batches[-1].append([])
            batches[-1][row].append(i)
            room[row] -= len(sample.ids)
        return batches

    def by_length(self) -> list[list[int]]:
        """Batches of every sample once, a row each, the shortest first."""
        return self._cut(sorted(range(len(self.samples)), key=lambda i: len(self.samples[i].ids)))

    def layout(self, indices: list[int]) -> tuple[list[list[int]], tuple[int, int]]:
        """The samples of each row of a batch, and its shape [B,T]."""
        (rows,) = [[[i] for i in indices]] if self.pack is None else self._pack(indices, self.pack)
        return rows, (len(rows), max(sum(len(self.samples[i].ids) for i in row) for row in rows))

    def collate(self, indices: list[int]) -> Batch:
        """Return the samples at `indices` as one batch, padded on the right."""
        rows, shape = self.layout(indices)
        tokens, documents = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
        mask, weights = torch.zeros(shape), torch.ones(shape)
        for r, row in enumerate(rows):
            end = 0
            for i in row:
                sample = self.samples[i]
                here = slice(end, end := end + len(sample.ids))
                tokens[r, here], mask[r, here] = torch.from_numpy(sample.ids), torch.from_numpy(sample.mask)
                documents[r, end:] += 1
                if sample.weights is not None:
                    weights[r, here] = torch.from_numpy(sample.weights)
        weighted = any(self.samples[i].weights is not None for i in indices)
        numbers: Any = [[self.samples[i].number for i in row] for row in rows]
        return Batch(tokens, mask, documents, weights if weighted else None, numbers, self.pack is not None)

    def iterate(self, skip: int = 0) -> Iterator[Batch]:
        """The batches of all epochs, without the first `skip`."""
        return map(self.collate, itertools.islice(self.order(), skip, None))

    def order(self) -> Iterator[list[int]]:
        """The batches of all epochs, as lists of sample indices."""
        for number in itertools.count():
            yield from self.epoch(number)
