"""Batches of similar lengths, in an order that depends on the seed alone."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from training.data.render import Sample


@dataclass
class Batch:
    """Right-padded rows: tokens [B,T] and loss_mask [B,T] (fp32, 0 on padding)."""

    tokens: Tensor
    loss_mask: Tensor


class Batches:
    """An endless, deterministic order of batches of similar lengths, at most `batch_tokens` padded tokens each.

    Batch k of epoch e depends on (seed, e, k) alone, so that a resumed run goes on where it was.
    """

    POOL = 32  # batches whose samples are sorted by length together

    def __init__(self, samples: list[Sample], batch_tokens: int, seed: int):
        if not samples:
            raise ValueError("the data hold no conversation in which the assistant speaks")
        self.samples, self.batch_tokens, self.seed = samples, batch_tokens, seed

    def epoch(self, number: int) -> list[list[int]]:
        """The batches of one epoch, as lists of sample indices."""
        rng = np.random.default_rng([self.seed, number])
        order = rng.permutation(len(self.samples))
        mean = sum(len(s.ids) for s in self.samples) / len(self.samples)
        pool = max(1, int(self.POOL * self.batch_tokens / mean))
        batches: list[list[int]] = []
        for start in range(0, len(order), pool):
            batches += self._cut(sorted(order[start : start + pool], key=lambda i: len(self.samples[i].ids)))
        rng.shuffle(batches)
        return batches

    def _cut(self, indices: list[int]) -> list[list[int]]:
        batches: list[list[int]] = [[]]
        for i in indices:  # ascending, so the newest is the longest
            if batches[-1] and (len(batches[-1]) + 1) * len(self.samples[i].ids) > self.batch_tokens:
                batches.append([])
            batches[-1].append(int(i))
        return batches

    def collate(self, indices: list[int]) -> Batch:
        rows = [self.samples[i] for i in indices]
        shape = len(rows), max(len(row.ids) for row in rows)
        tokens, mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
        for i, row in enumerate(rows):
            tokens[i, : len(row.ids)] = torch.from_numpy(row.ids)
            mask[i, : len(row.ids)] = torch.from_numpy(row.mask)
        return Batch(tokens, mask)

    def iterate(self, skip: int = 0) -> Iterator[Batch]:
        """All epochs one after the other, the first `skip` batches left out."""
        number = 0
        while True:
            for indices in self.epoch(number):
                if skip > 0:
                    skip -= 1
                    continue
                yield self.collate(indices)
            number += 1
