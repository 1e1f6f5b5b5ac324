"""All metrics of a trace, with confidence intervals, and by category."""

import math
import random
from collections.abc import Callable

import torch

from specdec.engine.recorder import TracedRow
from specdec.lab.traces.metrics import BY_DEPTH, METRICS, Rows, rounds_of

Interval = tuple[float, float]


def by_category(rows: Rows) -> dict[str, list[TracedRow]]:
    """The rows of each category, in order of appearance; those without one are left out."""
    groups: dict[str, list[TracedRow]] = {}
    for row in rows:
        if row.category is not None:
            groups.setdefault(row.category, []).append(row)
    return groups


def bootstrap(
    measure: Callable[[Rows], float | list[float]],
    rows: Rows,
    *,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> list[Interval]:
    """Percentile intervals of a metric, one for each of its values (one for a number).

    Questions are drawn with replacement, each with all its rows: rounds of a text are not independent, and neither are
    the turns of a conversation. With fewer than two questions nothing can be said, and intervals are (nan, nan).
    Raises ValueError for a level outside (0, 1), and for fewer than one resample."""
    if not 0 < level < 1:
        raise ValueError(f"the level of an interval must lie between 0 and 1, got {level}")
    if resamples < 1:
        raise ValueError(f"resamples must be at least 1, got {resamples}")
    groups: dict[str, list[TracedRow]] = {}
    for row in rows:
        groups.setdefault(row.question, []).append(row)
    questions = list(groups.values())
    count = len(_as_list(measure(rows)))
    if len(questions) < 2 or not count:  # a plain decoding has no depth
        return [(math.nan, math.nan)] * count
    draws = random.Random(seed)
    values = []
    for _ in range(resamples):
        drawn = draws.choices(questions, k=len(questions))
        found = _as_list(measure([row for question in drawn for row in question]))
        values.append(found + [math.nan] * (count - len(found)))  # none of the deepest trees was drawn
    tails = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = torch.tensor(values, dtype=torch.float64).nanquantile(tails, dim=0).tolist()
    return list(zip(low, high, strict=True))


def _as_list(value: float | list[float]) -> list[float]:
    return value if isinstance(value, list) else [value]


def summary(rows: Rows, **how) -> dict:
    """All metrics, each value with its interval: {"questions", "rows", "rounds", "metrics", "by_depth", "by_category"}.

    how: settings of `bootstrap`. What is not defined is None, as JSON has no nan."""
    measured = _measure(rows, **how)
    categories = {name: _measure(group, **how) for name, group in by_category(rows).items()}
    return {**measured, "by_category": categories}


def _measure(rows: Rows, **how) -> dict:
    def entries(measure: Callable) -> list[dict]:
        values, intervals = _as_list(measure(rows)), bootstrap(measure, rows, **how)
        return [entry(value, *interval) for value, interval in zip(values, intervals, strict=True)]

    return {
        "questions": len({row.question for row in rows}),
        "rows": len(rows),
        "rounds": rounds_of(rows),
        "metrics": {name: entries(measure)[0] for name, measure in METRICS.items()},
        "by_depth": {name: entries(measure) for name, measure in BY_DEPTH.items()},
    }


def entry(value: float, low: float, high: float) -> dict[str, float | None]:
    """A value and its interval as JSON has them: None where it is nan."""
    named = {"value": value, "low": low, "high": high}
    return {key: None if math.isnan(number) else number for key, number in named.items()}
