"""Every metric by name, computed from traces.

Each function takes the rows of a trace (`specdec.engine.recorder.TracedRow`). It returns nan where it is not defined:
without a round, without drafts, or on trees where its authors know chains only. docs/metrics.md says who means which.

In the formulas a round accepts `a` drafted tokens before any cut at the end of the text, and adds `e` tokens to the
text. Unless the end cuts it, e = a + 1: the bonus token counts.
"""

import math
from collections.abc import Callable, Sequence

from specdec.engine import traces
from specdec.engine.recorder import TracedRow

Rows = Sequence[TracedRow]
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
    """Ours: sum(e) / rounds over all rows. See `specdec.engine.traces.tau`, which `generate` reports too."""
    return traces.tau([row.trace for row in rows]) if rounds_of(rows) else math.nan


@metric
def tau_macro(rows: Rows) -> float:
    """The mean over rows of each row's `tau`: short answers weigh as much as long ones. Rows without a round are left
    out."""
    return _mean([traces.tau([row.trace]) for row in rows if row.rounds])


@metric
def eagle_tau(rows: Rows) -> float:
    """sum(a + 1) / rounds over all rows; what lies behind the end of the text counts.

    EAGLE's average acceptance length (SafeAILab/EAGLE: `new_token / (idx + 1)`, idx the loop's 0-based counter),
    Spec-Bench's #Mean accepted tokens (hemingkx/Spec-Bench `evaluation/speed.py`: the mean of all rounds'
    accept_lengths), and the block efficiency of speculative decoding's papers (arXiv 2211.17192)."""
    return _share(sum(sum(row.trace.accepted) for row in rows) + rounds_of(rows), rounds_of(rows))


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
    return _share(len(rows) + sum(sum(row.trace.emitted) for row in rows), rounds_of(rows))


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


@metric
def undrafted_share(rows: Rows) -> float:
    """Rounds in which nothing was drafted / rounds: the drafter had nothing to propose."""
    return _share(sum(row.trace.undrafted for row in rows), rounds_of(rows))


@metric
def experts_per_verification(rows: Rows) -> float:
    """Of a target with experts: how many distinct ones the nodes of a round asked in a layer, all rows of the batch
    together; the mean over layers and rounds. Each is read from memory once, so this is what a tree costs there."""
    return _mean([r.experts for row in rows for r in row.rounds if r.experts is not None])


@metric_by_depth
def vllm_per_position_rates(rows: Rows) -> list[float]:
    """For d = 1..D the share of drafts that accepted at least d tokens: not conditional on d - 1, so it never rises.

    vLLM, `num_accepted_tokens_per_pos / num_drafts`. Of a tree it is the acceptance by depth that `generate` prints."""
    drafting = [row.drafting for row in rows]
    steps = _steps(rows)
    if not sum(row.rounds for row in drafting):
        return [math.nan] * steps
    return traces.acceptance_by_depth(drafting, steps)


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


def rounds_of(rows: Rows) -> int:
    """The rounds of all rows together."""
    return sum(row.trace.rounds for row in rows)


def _steps(rows: Rows) -> int:
    return max((row.steps for row in rows), default=0)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _mean(values: list[float]) -> float:
    return _share(sum(values), len(values))
