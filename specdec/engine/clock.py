"""Time per part of a round."""

import time
from collections import defaultdict
from itertools import pairwise
from typing import Any

import torch

MOST = 4096  # marks stored before they are summed


class Clock:
    """Time per part of a round, without synchronising: wall clock on the CPU, events on a GPU.

    `position` counts marks from the beginning. Old marks can be added up (`fold`), so that a clock that runs on and on
    does not grow.
    """

    def __init__(self, device: torch.device):
        """Start the clock for work on this device."""
        self.cuda = device.type == "cuda"
        self.marks: list[tuple[str, Any]] = []  # times, or events of a GPU
        self.folded: dict[str, float] = defaultdict(float)  # seconds by part of the marks that are gone
        self.gone = 0  # how many those are
        self.mark("")

    @property
    def position(self) -> int:
        """Number of marks so far."""
        return self.gone + len(self.marks)

    def mark(self, part: str) -> None:
        """Attribute the time since the last mark to `part`."""
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append((part, event))
        else:
            self.marks.append((part, time.perf_counter()))

    def seconds(self, first: int = 0) -> dict[str, float]:
        """Return the seconds of each part from mark `first` on. This waits for the device."""
        total = defaultdict(float, self.folded if first < self.gone else {})
        for part, seconds in self.intervals(first):
            total[part] += seconds
        return dict(total)

    def intervals(self, first: int = 0) -> list[tuple[str, float]]:
        """Return each mark's part and its seconds, in order, from mark `first` on. This waits for the device."""
        if self.cuda:
            self.marks[-1][1].synchronize()  # the others were recorded before it
        return [
            (part, before.elapsed_time(now) / 1e3 if self.cuda else now - before)
            for (_, before), (part, now) in pairwise(self.marks[max(first - self.gone, 0) :])
        ]

    def fold(self) -> None:
        """Replace the marks by their sums once there are many. Then this waits for the device."""
        if len(self.marks) > MOST:
            for part, seconds in self.intervals(self.gone):
                self.folded[part] += seconds
            self.gone += len(self.marks) - 1
            del self.marks[:-1]


class SilentClock:
    """A clock without marks, for captured rounds: a replay does not run a mark."""

    def mark(self, part: str) -> None:
        """Do nothing."""
