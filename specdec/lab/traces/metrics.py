"""Print every metric of one or more traces."""

import argparse
import inspect
import json
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.table import Table

from specdec.cli.terminal import console
from specdec.engine import traces
from specdec.engine.recorder import TracedRow
from specdec.engine.trace_files import read_trace
from specdec.engine.traces import DEPTH_IN_WORDS
from specdec.lab.models import as_list

Rows = Sequence[TracedRow]
Interval = tuple[float, float]
METRICS: dict[str, Callable[[Rows], float]] = {}
BY_DEPTH: dict[str, Callable[[Rows], list[float]]] = {}

# A metric takes the rows of a trace. It returns nan where it is not defined: without a round, without drafts, or on
# trees if it is defined for chains only. docs/metrics.md names the users of each. In the formulas a round accepts `a`
# drafted tokens before any cut at the end of the text, and adds `e` tokens to the text. Unless the end cuts it,
# e = a + 1: the bonus token counts.


def metric(function: Any) -> Any:
    """Register a metric under the function's name. A function annotated to return a list has a value for each depth."""
    by_depth = inspect.get_annotations(function)["return"] == list[float]
    (BY_DEPTH if by_depth else METRICS)[function.__name__] = function
    return function


@metric
def tau(rows: Rows) -> float:
    """Ours: sum(e) / rounds over all rows. See `specdec.engine.traces.tau`, which `generate` reports too."""
    return traces.tau([row.trace for row in rows]) if rounds_of(rows) else math.nan


@metric
def tau_macro(rows: Rows) -> float:
    """Return the mean of `tau` over the rows with a round, so short answers weigh as much as long ones."""
    return _mean([traces.tau([row.trace]) for row in rows if row.rounds])


@metric
def eagle_tau(rows: Rows) -> float:
    """sum(a + 1) / rounds over all rows; tokens after the end of the text count.

    EAGLE's average acceptance length (SafeAILab/EAGLE: `new_token / (idx + 1)`, idx the loop's 0-based counter),
    Spec-Bench's #Mean accepted tokens (hemingkx/Spec-Bench `evaluation/speed.py`: the mean of all rounds'
    accept_lengths), and the block efficiency of speculative decoding's papers (arXiv 2211.17192).
    """
    return _share(sum(sum(row.trace.accepted) for row in rows) + rounds_of(rows), rounds_of(rows))


@metric
def hass_tau(rows: Rows) -> float:
    """Return the mean of 1 + mean(a) over rows with a round. HASS averages each question first (arXiv 2408.15766)."""
    return _mean([1 + sum(row.trace.accepted) / row.trace.rounds for row in rows if row.rounds])


@metric
def vllm_mean_acceptance_length(rows: Rows) -> float:
    """Return 1 + sum(a) / rounds with drafted tokens, those after the end too (`vllm/v1/spec_decode/metrics.py`)."""
    drafts = sum(row.drafting.rounds for row in rows)
    return 1 + _share(sum(sum(row.drafting.accepted) for row in rows), drafts)


@metric
def sglang_accept_length(rows: Rows) -> float:
    """Return the answers' tokens per round.

    The prefill's token counts although no round made it, so short answers score higher. This is `completion_tokens /
    spec_verify_ct` of SGLang's meta info (sgl-project/SpecForge `benchmarks/benchmarker/utils.py`, which calls an
    answer without a round 1).
    """
    return _share(len(rows) + sum(sum(row.trace.emitted) for row in rows), rounds_of(rows))


@metric
def mtp_acceptance_rate(rows: Rows) -> float:
    """Return sum(a) / drafted tokens, without the bonus, for chains only.

    Model cards of targets with multi-token prediction give this rate. With one head it is the first of
    `vllm_per_position_rates`, DeepSeek-V3's acceptance rate of the second token. NaN if a tree is no chain.
    """
    return draft_token_efficiency(rows) if all(row.chains for row in rows) else math.nan


@metric
def draft_token_efficiency(rows: Rows) -> float:
    """Return sum(a) / sum(N - 1): for chains vLLM's draft acceptance rate (`vllm/v1/spec_decode/metrics.py`)."""
    return _share(sum(sum(row.trace.accepted) for row in rows), sum(sum(row.drafted) for row in rows))


@metric
def undrafted_share(rows: Rows) -> float:
    """Rounds in which nothing was drafted / rounds: the drafter had nothing to propose."""
    return _share(sum(row.trace.undrafted for row in rows), rounds_of(rows))


@metric
def experts_per_verification(rows: Rows) -> float:
    """Return the mean number of distinct experts that a layer uses in a round, over layers and rounds.

    All rows of the batch count together. Each expert is read from memory once, so this is what a tree costs in a target
    with experts.
    """
    return _mean([r.experts for row in rows for r in row.rounds if r.experts is not None])


@metric
def acceptance_by_depth(rows: Rows) -> list[float]:
    """For d = 1..D the share of all rounds that accepted at least d drafted tokens; all commands print this one."""
    return _by_depth([row.trace for row in rows], _steps(rows))


@metric
def vllm_per_position_rates(rows: Rows) -> list[float]:
    """`acceptance_by_depth` over rounds with drafted tokens: vLLM's `num_accepted_tokens_per_pos / num_drafts`."""
    return _by_depth([row.drafting for row in rows], _steps(rows))


@metric
def n_alpha(rows: Rows) -> list[float]:
    """Return, for n = 0..D-1, the acceptance rate of tokens drafted from n of the drafter's own features.

    A token counts if it was examined, that is, if all tokens before it were accepted. NaN if a tree is no chain. EAGLE
    (arXiv 2401.15077; SafeAILab/EAGLE `eagle/model/utils_alpha.py`).
    """
    if not all(row.chains for row in rows):
        return [math.nan] * _steps(rows)
    rounds = [both for row in rows for both in zip(row.trace.accepted, row.drafted, strict=True)]
    taken = traces.at_least((a for a, _ in rounds), _steps(rows))
    examined = traces.at_least((min(a, drafted - 1) for a, drafted in rounds), _steps(rows))
    return [_share(*both) for both in zip(taken[1:], examined[:-1], strict=True)]


def rounds_of(rows: Rows) -> int:
    """The rounds of all rows together."""
    return sum(row.trace.rounds for row in rows)


def _by_depth(rows: list[traces.RowTrace], steps: int) -> list[float]:
    return traces.acceptance_by_depth(rows, steps) if any(row.rounds for row in rows) else [math.nan] * steps


def _steps(rows: Rows) -> int:
    return max((row.steps for row in rows), default=0)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _mean(values: list[float]) -> float:
    return _share(sum(values), len(values))


def by_category(rows: Rows) -> dict[str, list[TracedRow]]:
    """The rows of each category, in order of appearance; those without one are left out."""
    names = dict.fromkeys(row.category for row in rows if row.category is not None)
    return {name: [row for row in rows if row.category == name] for name in names}


def bootstrap(
    measure: Callable[[Rows], Any], rows: Rows, *, level: float = 0.95, resamples: int = 1000, seed: int = 0
) -> list[Interval]:
    """Percentile intervals of a metric, one for each of its values (one for a number).

    Questions are drawn with replacement, each with all its rows: rounds of a text are not independent, and neither are
    the turns of a conversation. With fewer than two questions nothing can be said, and intervals are (nan, nan).
    Raises ValueError for a level outside (0, 1), and for fewer than one resample.
    """
    if not 0 < level < 1:
        raise ValueError(f"the level of an interval must lie between 0 and 1, got {level}")
    if resamples < 1:
        raise ValueError(f"resamples must be at least 1, got {resamples}")
    by_question: dict[str, list[TracedRow]] = {}
    for row in rows:
        by_question.setdefault(row.question, []).append(row)
    questions = list(by_question.values())
    count = len(as_list(measure(rows)))
    if len(questions) < 2 or not count:  # a plain decoding has no depth
        return [(math.nan, math.nan)] * count
    draws = random.Random(seed)
    values = []
    for _ in range(resamples):
        drawn = draws.choices(questions, k=len(questions))
        found = as_list(measure([row for question in drawn for row in question]))
        values.append(found + [math.nan] * (count - len(found)))  # none of the deepest trees was drawn
    tails = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = torch.tensor(values, dtype=torch.float64).nanquantile(tails, dim=0).tolist()
    return list(zip(low, high, strict=True))


def summary(rows: Rows, **how) -> dict:
    """All metrics, each value with its interval: {"questions", "rows", "rounds", "metrics", "by_depth", "by_category"}.

    how: settings of `bootstrap`. What is not defined is None, as JSON has no nan.
    """
    categories = {name: _measure(group, **how) for name, group in by_category(rows).items()}
    return _measure(rows, **how) | {"by_category": categories}


def _measure(rows: Rows, **how) -> dict:
    def entries(measure: Callable) -> list[dict]:
        values, intervals = as_list(measure(rows)), bootstrap(measure, rows, **how)
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


def tables(summaries: dict[str, dict]) -> list[Table]:
    """Tables of summaries by name: the metrics, the metrics by depth, and tau by category where there are any."""
    count = "\n".join(f"{name}: {s['questions']} questions, {s['rounds']} rounds" for name, s in summaries.items())
    scalar = Table("metric", *summaries, title="metrics", caption=count)
    for name in METRICS:
        scalar.add_row(name, *(_cell(s["metrics"][name]) for s in summaries.values()))
    deep = Table("metric", "depth", *summaries, title="by depth", caption=f"acceptance_by_depth: {DEPTH_IN_WORDS}")
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


def run(args: argparse.Namespace) -> None:
    """Run `specdec trace metrics`."""
    how = {"level": args.level, "resamples": args.resamples, "seed": args.seed}
    summaries = {str(folder): summary(read_trace(folder).rows, **how) for folder in args.traces}
    if args.json:
        print(json.dumps(summaries))
        return
    for table in tables(summaries):
        console(160).print(table)
