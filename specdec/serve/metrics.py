"""Counters, gauges and latencies of a server, as `prometheus_client` keeps and prints them.

Where vLLM has the same quantity the name is vLLM's, so that its clients and dashboards read it. The rest begins with
`specdec:`. Only tokens that responses hold are counted, not what an accepted path has after the end of a text.
"""

import threading
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from specdec.engine.prefill import Prefixes
from specdec.engine.report import RoundReport

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
DEPTHS = "vllm:spec_decode_num_accepted_tokens_per_pos"

# name: (type, help, label in addition to the model and the engine). A scrape shows a counter's name with `_total`.
FAMILIES = {
    "vllm:num_requests_running": (Gauge, "Sequences that have a row."),
    "vllm:num_requests_waiting": (Gauge, "Sequences that wait for a row."),
    "vllm:kv_cache_usage_perc": (Gauge, "Share of the rows that are taken, 0 to 1."),
    "vllm:prompt_tokens": (Counter, "Tokens of the prompts that were prefilled."),
    "vllm:prefix_cache_queries": (Counter, "Tokens of prompts that were looked up in the prefix cache."),
    "vllm:prefix_cache_hits": (Counter, "Tokens of prompts that were found there, and not read again."),
    "vllm:generation_tokens": (Counter, "Tokens that were emitted."),
    "vllm:request_success": (Counter, "Sequences that have ended, by reason.", "finished_reason"),
    "vllm:spec_decode_num_drafts": (Counter, "Rounds of single sequences in which something was drafted."),
    "vllm:spec_decode_num_draft_tokens": (Counter, "Drafted tokens: nodes of trees without their roots."),
    "vllm:spec_decode_num_accepted_tokens": (Counter, "Drafted tokens that were emitted."),
    DEPTHS: (Counter, "The same, by depth in the tree, from 0.", "position"),
    "specdec:rounds": (Counter, "Rounds of the engine, each of which serves all rows."),
    "specdec:sequence_rounds": (Counter, "Rounds of single sequences."),
    "specdec:round_tokens": (Counter, "Tokens that rounds emitted: all but the first of every sequence."),
    "specdec:tau": (Gauge, "round_tokens / sequence_rounds since the start."),
    "specdec:requests_refused": (Counter, "HTTP requests that were refused, by status.", "status"),
    "vllm:time_to_first_token_seconds": (Histogram, "From the arrival of a sequence to its first token."),
    "vllm:inter_token_latency_seconds": (Histogram, "Between two steps that gave a sequence tokens."),
    "vllm:request_queue_time_seconds": (Histogram, "From the arrival of a sequence to its prefill."),
    "vllm:e2e_request_latency_seconds": (Histogram, "From the arrival of a sequence to its end."),
}


class Metrics:
    """All series of `FAMILIES`, in a registry of their own. A thread that holds `lock` sees no partial update."""

    def __init__(self, model: str, positions: int = 0):
        """Make all series whose labels are known. positions: the deepest level of a tree."""
        disable_created_metrics()  # `_created` series, which vLLM does not have either
        self.registry, self.lock = CollectorRegistry(), threading.RLock()
        self.own = {"model_name": model, "engine": "0"}
        self.families: dict[str, Any] = {}
        self.series: dict[tuple, Any] = {}  # the library takes longer to find a series than to count
        for name, (kind, says, *labels) in FAMILIES.items():
            make: Any = kind
            buckets = {"buckets": SECONDS} if kind is Histogram else {}
            self.families[name] = make(name, says, [*self.own, *labels], registry=self.registry, **buckets)
            if not labels:
                self.of(name)
        for position in range(positions):
            self.of(DEPTHS, position=position)
        for reason in ("stop", "length", "abort", "error"):
            self.of("vllm:request_success", finished_reason=reason)

    def of(self, name: str, **labels):
        """Return the series of these labels. From now on it is part of every scrape."""
        key = name, *labels.values()
        if key not in self.series:
            self.series[key] = self.families[name].labels(**self.own, **labels)
        return self.series[key]

    def value(self, name: str, **labels) -> float:
        """Return the value of a counter, a gauge, or a histogram's `_sum` or `_count`; 0 if there is no such series."""
        shown = f"{name}_total" if FAMILIES.get(name, (None,))[0] is Counter else name
        given = {label: str(value) for label, value in labels.items()}
        return self.registry.get_sample_value(shown, self.own | given) or 0.0

    def text(self) -> str:
        """Return all series in the text format of Prometheus."""
        with self.lock:
            rounds = self.value("specdec:sequence_rounds")
            self.of("specdec:tau").set(self.value("specdec:round_tokens") / rounds if rounds else 0.0)
            return generate_latest(self.registry).decode()


def count(
    metrics: Metrics, report: RoundReport, live: list[bool], drafts: list[int], prefixes: Prefixes | None = None
) -> None:
    """Count the tokens of a step. live: which rows had not ended before. drafts: `drafted_of`."""
    emitted = sum(map(len, report.emitted))

    def add(name: str, amount: float = 1, **labels) -> None:
        metrics.of(name, **labels).inc(amount)

    add("vllm:generation_tokens", emitted)
    if report.prefill:
        prompts = sum(len(row.prompt) for row in report.rows)
        add("vllm:prompt_tokens", prompts)
        if prefixes is not None:
            add("vllm:prefix_cache_queries", prompts)
            add("vllm:prefix_cache_hits", sum(row.cached for row in report.rows))
        return
    add("specdec:rounds")
    add("specdec:sequence_rounds", sum(live))
    add("specdec:round_tokens", emitted)
    rows = zip(live, report.accepted, drafts, strict=True)
    accepted = [accepted for alive, accepted, drafted in rows if alive and drafted]
    add("vllm:spec_decode_num_drafts", len(accepted))
    add("vllm:spec_decode_num_draft_tokens", sum(n for alive, n in zip(live, drafts, strict=True) if alive))
    add("vllm:spec_decode_num_accepted_tokens", sum(accepted))
    for position in range(max(accepted, default=0)):
        add(DEPTHS, sum(n > position for n in accepted), position=position)


def drafted_of(report: RoundReport, steps: int) -> list[int]:
    """Return how many tokens a round drafted for each row. steps: levels of the engine's tree."""
    if report.prefill:
        return [0] * len(report.rows)
    if report.levels is None:  # a captured round shows no tree, and every row has a whole one
        return [report.nodes - 1] * len(report.rows)
    if report.tree is None:  # one token a level where not all of them count: exact for chains
        return [report.nodes - 1 if most >= steps else min(most, report.nodes - 1) for most in report.levels]
    depth = report.tree.depth.tolist()
    return [sum(0 < d <= most for d in row) for row, most in zip(depth, report.levels, strict=True)]
