"""Time per part of a round."""

import time
from collections import defaultdict
from itertools import pairwise

import torch


class Clock:
    """Time per part of a round, without synchronising: wall clock on the CPU, events on a GPU."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.marks: list[tuple[str, object]] = []
        self.mark("")

    def mark(self, part: str) -> None:
        """The time since the last mark belongs to `part`."""
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append((part, event))
        else:
            self.marks.append((part, time.perf_counter()))

    def seconds(self, first: int = 0) -> dict[str, float]:
        """By part, from mark `first` on; waits for the device."""
        total: dict[str, float] = defaultdict(float)
        for part, seconds in self.intervals(first):
            total[part] += seconds
        return dict(total)

    def intervals(self, first: int = 0) -> list[tuple[str, float]]:
        """Each mark's part and its seconds, in order, from mark `first` on; waits for the device."""
        if self.cuda:
            torch.cuda.synchronize()
        return [
            (part, before.elapsed_time(now) / 1e3 if self.cuda else now - before)
            for (_, before), (part, now) in pairwise(self.marks[first:])
        ]


class SilentClock:
    """A clock that notes nothing, for rounds that are recorded: a mark is no part of them."""

    def mark(self, part: str) -> None:
        pass
