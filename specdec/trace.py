"""What happened while decoding: rounds, accepted lengths, time per part; and the metrics computed from it."""

import time
from collections import defaultdict
from dataclasses import dataclass, field
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


class Silent:
    """A clock that notes nothing, for rounds that are recorded: a mark is no part of them."""

    def mark(self, part: str) -> None:
        pass


@dataclass
class RowTrace:
    """One sequence: `accepted[r]` is the number of drafted tokens that round r accepted, before any cut at the end of
    the text; `emitted[r]` the number of tokens that it added to the output."""

    accepted: list[int] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        return len(self.emitted)


def tau(rows: list[RowTrace]) -> float:
    """Emitted tokens per round over all rows: the bonus token counts, the prefill's first token does not, and neither
    does what lies behind the end of the text. The micro-average of Spec-Bench, with its ends cut off."""
    rounds = sum(row.rounds for row in rows)
    return sum(sum(row.emitted) for row in rows) / rounds if rounds else 0.0


def acceptance_by_depth(rows: list[RowTrace], steps: int) -> list[float]:
    """For d = 1..steps the share of rounds that accepted at least d drafted tokens (vLLM's unconditional rate)."""
    accepted = [a for row in rows for a in row.accepted]
    return [sum(a >= d for a in accepted) / len(accepted) if accepted else 0.0 for d in range(1, steps + 1)]
