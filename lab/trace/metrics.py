"""Every metric by name, computed from traces:  specdec metrics TRACE...

Each function takes the rows of a trace (`specdec.engine.recorder.TracedRow`). It returns nan where it is not defined:
without a round, without drafts, or on trees where its authors know chains only. docs/metrics.md says who means which.

In the formulas a round accepts `a` drafted tokens before any cut at the end of the text, and adds `e` tokens to the
text. Unless the end cuts it, e = a + 1: the bonus token counts.
"""

import argparse
import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.table import Table

from lab.output import console
from specdec.cli.errors import one_sentence_errors
from specdec.cli.flags import command_parser
from specdec.engine import trace
from specdec.engine.recorder import TracedRow
from specdec.engine.trace_files import read_trace

Rows = Sequence[TracedRow]
Interval = tuple[float, float]
METRICS: dict[str, Callable[[Rows], float]] = {}
BY_DEPTH: dict[str, Callable[[Rows], list[float]]] = {}


def metric(function: Callable[[Rows], float]) -> Callable[[Rows], float]:
    """Register a metric: summaries and tables show it under the function's name."""
    METRICS[function.__name__] = function
    return function


def metric_by_depth(function: Callable[[Rows], list[float]]) -> Callable[[Rows], list[float]]:
    """Register a metric that has a value for each depth."""
    BY_DEPTH[function.__name__] = function
    return function


@metric
def tau(rows: Rows) -> float:
    """Ours: sum(e) / rounds over all rows. See `specdec.engine.trace.tau`, which `generate` reports too."""
    return trace.tau([row.trace for row in rows]) if _rounds(rows) else math.nan


@metric
def tau_macro(rows: Rows) -> float:
    """The mean over rows of each row's `tau`: short answers weigh as much as long ones. Rows without a round are left
    out."""
    return _mean([trace.tau([row.trace]) for row in rows if row.rounds])


@metric
def eagle_tau(rows: Rows) -> float:
    """sum(a + 1) / rounds over all rows; what lies behind the end of the text counts.

    EAGLE's average acceptance length (SafeAILab/EAGLE: `new_token / (idx + 1)`, idx the loop's 0-based counter),
    Spec-Bench's #Mean accepted tokens (hemingkx/Spec-Bench `evaluation/speed.py`: the mean of all rounds'
    accept_lengths), and the block efficiency of speculative decoding's papers (arXiv 2211.17192)."""
    return _share(sum(sum(row.trace.accepted) for row in rows) + _rounds(rows), _rounds(rows))


@metric
def hass_tau(rows: Rows) -> float:
    """The mean over rows of 1 + mean(a): HASS (arXiv 2408.15766) averages each question first. Rows without a round are
    left out."""
    return _mean([1 + sum(row.trace.accepted) / row.trace.rounds for row in rows if row.rounds])


@metric
def vllm_mean_acceptance_length(rows: Rows) -> float:
    """1 + sum(a) / drafts, where a draft is a round in which something was drafted; behind the end of the text counts.

    vLLM, `vllm/v1/spec_decode/metrics.py`."""
    drafts = sum(row.drafting.rounds for row in rows)
    return 1 + _share(sum(sum(row.drafting.accepted) for row in rows), drafts)


@metric
def sglang_accept_length(rows: Rows) -> float:
    """Tokens of the answers / rounds. The prefill's token is one of them, though no round made it: short answers score
    higher.

    `completion_tokens / spec_verify_ct` of SGLang's meta info (sgl-project/SpecForge `benchmarks/benchmarker/utils.py`,
    which calls an answer without a round 1)."""
    return _share(len(rows) + sum(sum(row.trace.emitted) for row in rows), _rounds(rows))


@metric
def mtp_acceptance_rate(rows: Rows) -> float:
    """sum(a) / drafted tokens, without the bonus: what model cards of targets with multi-token prediction give. Of
    chains only; with one head it is the first of `vllm_per_position_rates`, DeepSeek-V3's rate of the second token."""
    return draft_token_efficiency(rows) if all(row.chains for row in rows) else math.nan


@metric
def draft_token_efficiency(rows: Rows) -> float:
    """sum(a) / sum(N - 1): which share of the nodes that the target verified was accepted. vLLM's draft acceptance rate
    (`vllm/v1/spec_decode/metrics.py`), there of chains."""
    return _share(sum(sum(row.trace.accepted) for row in rows), sum(sum(row.drafted) for row in rows))


@metric_by_depth
def vllm_per_position_rates(rows: Rows) -> list[float]:
    """For d = 1..D the share of drafts that accepted at least d tokens: not conditional on d - 1, so it never rises.

    vLLM, `num_accepted_tokens_per_pos / num_drafts`. Of a tree it is the acceptance by depth that `generate` prints."""
    drafting = [row.drafting for row in rows]
    steps = _steps(rows)
    if not sum(row.rounds for row in drafting):
        return [math.nan] * steps
    return trace.acceptance_by_depth(drafting, steps)


@metric_by_depth
def n_alpha(rows: Rows) -> list[float]:
    """For n = 0..D-1 the share of drafted tokens accepted among those that were examined, i.e. all before them were
    accepted, and that were drafted from n features of the drafter's own. Of chains only.

    EAGLE (arXiv 2401.15077; SafeAILab/EAGLE `eagle/model/utils_alpha.py`)."""
    if not all(row.chains for row in rows):
        return [math.nan] * _steps(rows)
    rounds = [both for row in rows for both in zip(row.trace.accepted, row.drafted, strict=True)]
    return [
        _share(sum(a > n for a, _ in rounds), sum(a >= n and drafted > n for a, drafted in rounds))
        for n in range(_steps(rows))
    ]


def _rounds(rows: Rows) -> int:
    return sum(row.trace.rounds for row in rows)


def _steps(rows: Rows) -> int:
    return max((row.steps for row in rows), default=0)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _mean(values: list[float]) -> float:
    return _share(sum(values), len(values))


# Intervals and groups


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
    the turns of a conversation. (nan, nan) with fewer than two questions, of which nothing can be said."""
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

    `how` goes to `bootstrap`. What is not defined is None, so that it is JSON."""
    measured = _measure(rows, **how)
    categories = {name: _measure(group, **how) for name, group in by_category(rows).items()}
    return {**measured, "by_category": categories}


def _measure(rows: Rows, **how) -> dict:
    def entries(measure: Callable) -> list[dict]:
        values, intervals = _as_list(measure(rows)), bootstrap(measure, rows, **how)
        return [_entry(value, *interval) for value, interval in zip(values, intervals, strict=True)]

    return {
        "questions": len({row.question for row in rows}),
        "rows": len(rows),
        "rounds": _rounds(rows),
        "metrics": {name: entries(measure)[0] for name, measure in METRICS.items()},
        "by_depth": {name: entries(measure) for name, measure in BY_DEPTH.items()},
    }


def _entry(value: float, low: float, high: float) -> dict[str, float | None]:
    entry = {"value": value, "low": low, "high": high}
    return {key: None if math.isnan(number) else number for key, number in entry.items()}


# The command


def tables(summaries: dict[str, dict]) -> list[Table]:
    """Of the summaries by name: the metrics, the metrics by depth, and tau by category where there are any."""
    count = "\n".join(f"{name}: {s['questions']} questions, {s['rounds']} rounds" for name, s in summaries.items())
    scalar = Table("metric", *summaries, title="metrics", caption=count)
    for name in METRICS:
        scalar.add_row(name, *(_cell(s["metrics"][name]) for s in summaries.values()))
    deep = Table("metric", "depth", *summaries, title="by depth")
    for name in BY_DEPTH:
        columns = [s["by_depth"][name] for s in summaries.values()]
        for d in range(max(map(len, columns))):
            cells = [_cell(column[d]) if d < len(column) else "-" for column in columns]
            deep.add_row(name if d == 0 else "", str(d + 1), *cells)
    categories = list(dict.fromkeys(name for s in summaries.values() for name in s["by_category"]))
    grouped = Table("category", *summaries, title="tau by category")
    for category in categories:
        found = [s["by_category"].get(category) for s in summaries.values()]
        grouped.add_row(category, *(_cell(f["metrics"]["tau"]) if f else "-" for f in found))
    return [scalar, deep, *([grouped] if categories else [])]


def _cell(entry: dict[str, float | None]) -> str:
    if entry["value"] is None:
        return "-"
    between = "" if entry["low"] is None else f" [{entry['low']:.3f}, {entry['high']:.3f}]"
    return f"{entry['value']:.3f}{between}"


def parser() -> argparse.ArgumentParser:
    p = command_parser(
        "metrics", "Every metric of one trace or more; docs/metrics.md says what each means.", "TRACE ..."
    )
    p.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help="a folder that --trace wrote")
    p.add_argument("--level", type=float, default=0.95, help="of the confidence intervals (default 0.95)")
    p.add_argument("--resamples", type=int, default=1000, help="of the bootstrap over questions (default 1000)")
    p.add_argument("--seed", type=int, default=0, help="of the bootstrap")
    p.add_argument("--json", action="store_true", help="one JSON object, a trace's folder to its metrics, and no table")
    return p


@one_sentence_errors
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    how = {"level": args.level, "resamples": args.resamples, "seed": args.seed}
    summaries = {str(folder): summary(read_trace(folder).rows, **how) for folder in args.traces}
    if args.json:
        print(json.dumps(summaries))
        return
    for table in tables(summaries):
        console(160).print(table)


if __name__ == "__main__":
    main()
