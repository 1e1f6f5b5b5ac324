"""What happened while decoding: rounds, accepted lengths, time per part; and the metrics computed from it."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

DEPTH_IN_WORDS = "share of rounds that accepted at least d drafted tokens, over all rounds"
RESAMPLES = 1000


@dataclass
class RowTrace:
    """Accepted and emitted tokens of one sequence by round.

    `accepted[r]` is the number of drafted tokens that round r accepted, before any cut at the end of the text;
    `emitted[r]` the number of tokens that it added to the output.
    """

    accepted: list[int] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)
    undrafted: int = 0  # rounds in which nothing drafted for it was verified

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return len(self.emitted)


def tau(rows: list[RowTrace]) -> float:
    """Return the emitted tokens per round over all rows: the micro-average of Spec-Bench, cut at the end of texts.

    The bonus token counts. The first token, from the prefill, and tokens after the end of the text do not.
    """
    rounds = sum(row.rounds for row in rows)
    return sum(sum(row.emitted) for row in rows) / rounds if rounds else 0.0


def tau_interval(rounds: Tensor) -> tuple[float, float] | None:
    """Return the 95 % interval of tau (`interval_of`). rounds [texts,2]: of each text its rounds and emitted tokens."""
    return interval_of(lambda drawn: drawn[:, 1] / drawn[:, 0], rounds)


def interval_of(measure: Callable[[Tensor], Tensor], counts: Tensor) -> tuple[float, float] | None:
    """Return the 95 % interval of a measure; None for fewer than two texts.

    Texts are resampled with replacement (percentiles of a seeded bootstrap).
    measure: sums over texts [RESAMPLES,k] -> values [RESAMPLES]. counts [texts,k]: what is summed.
    """
    if len(counts) < 2:
        return None
    generator = torch.Generator().manual_seed(0)
    drawn = counts.double()[torch.randint(len(counts), (RESAMPLES, len(counts)), generator=generator)].sum(1)
    low, high = measure(drawn).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def acceptance_by_depth(rows: list[RowTrace], steps: int) -> list[float]:
    """Return for d = 1..steps the share of these rows' rounds that accepted at least d drafted tokens.

    The share is 0 without a round. `DEPTH_IN_WORDS` names this definition under charts and tables.
    """
    rounds, *reached = at_least((a for row in rows for a in row.accepted), steps)
    return [count / rounds if rounds else 0.0 for count in reached]


def at_least(values: Iterable[int], most: int) -> list[int]:
    """Return for d = 0..most how many of the values are d or more."""
    counts = Counter(min(value, most) for value in values)
    return list(accumulate(counts[d] for d in range(most, -1, -1)))[::-1]
