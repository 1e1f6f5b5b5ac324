"""What happened while decoding: rounds, accepted lengths, time per part; and the metrics computed from it."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

DEPTH_IN_WORDS = "share of rounds that accepted at least d drafted tokens, over all rounds"


@dataclass
class RowTrace:
    """One sequence: `accepted[r]` is the number of drafted tokens that round r accepted, before any cut at the end of
    the text; `emitted[r]` the number of tokens that it added to the output."""

    accepted: list[int] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)
    undrafted: int = 0  # rounds in which nothing was drafted for it

    @property
    def rounds(self) -> int:
        return len(self.emitted)


def tau(rows: list[RowTrace]) -> float:
    """Emitted tokens per round over all rows. The bonus token counts; the first token, from the prefill, does not, and
    neither do tokens after the end of the text. The micro-average of Spec-Bench, with its ends cut off."""
    rounds = sum(row.rounds for row in rows)
    return sum(sum(row.emitted) for row in rows) / rounds if rounds else 0.0


def tau_interval(rounds: Tensor, resamples: int = 1000) -> tuple[float, float] | None:
    """The 95 % interval of tau (`interval_of`). rounds [texts,2]: of each its rounds and the tokens that they emitted.

    None for fewer than two texts, of which nothing can be said."""
    return interval_of(lambda drawn: drawn[:, 1] / drawn[:, 0], rounds, resamples)


def interval_of(
    measure: Callable[[Tensor], Tensor], counts: Tensor, resamples: int = 1000
) -> tuple[float, float] | None:
    """Return the 95 % interval of a measure by resampling texts with replacement (percentiles of a seeded
    bootstrap); None for fewer than two texts.

    measure: sums over texts [resamples,k] -> values [resamples]. counts [texts,k]: what is summed."""
    if len(counts) < 2:
        return None
    generator = torch.Generator().manual_seed(0)
    drawn = counts.double()[torch.randint(len(counts), (resamples, len(counts)), generator=generator)].sum(1)
    low, high = measure(drawn).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def acceptance_by_depth(rows: list[RowTrace], steps: int) -> list[float]:
    """For d = 1..steps the share of rounds that accepted at least d drafted tokens, over all rounds of these rows; 0
    without a round. It is the only definition: `DEPTH_IN_WORDS` names it under charts and tables."""
    rounds, *reached = at_least((a for row in rows for a in row.accepted), steps)
    return [count / rounds if rounds else 0.0 for count in reached]


def at_least(values: Iterable[int], most: int) -> list[int]:
    """For d = 0..most how many of the values are d or more."""
    counts = Counter(min(value, most) for value in values)
    return list(accumulate(counts[d] for d in range(most, -1, -1)))[::-1]
