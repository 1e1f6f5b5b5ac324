"""Counts and latencies of a server, in the text format of Prometheus.

Where vLLM has the same quantity the name is vLLM's, so that its clients and dashboards read it. The rest begins with
`specdec:`. Tokens are those that responses hold: what an accepted path has behind the end of a text counts nowhere.
"""

import threading
from bisect import bisect_left

from specdec.engine.prefixes import Prefixes
from specdec.engine.report import RoundReport

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)

# name: (type, help). Counters get `_total` when they are printed.
FAMILIES = {
    "vllm:num_requests_running": ("gauge", "Sequences that have a row."),
    "vllm:num_requests_waiting": ("gauge", "Sequences that wait for a row."),
    "vllm:kv_cache_usage_perc": ("gauge", "Share of the rows that are taken, 0 to 1."),
    "vllm:prompt_tokens": ("counter", "Tokens of the prompts that were prefilled."),
    "vllm:prefix_cache_queries": ("counter", "Tokens of prompts whose beginnings were looked for among those kept."),
    "vllm:prefix_cache_hits": ("counter", "Tokens of prompts that were found there, and not read again."),
    "vllm:generation_tokens": ("counter", "Tokens that were emitted."),
    "vllm:request_success": ("counter", "Sequences that have ended, by reason."),
    "vllm:spec_decode_num_drafts": ("counter", "Rounds of single sequences in which something was drafted."),
    "vllm:spec_decode_num_draft_tokens": ("counter", "Drafted tokens: nodes of trees, roots aside."),
    "vllm:spec_decode_num_accepted_tokens": ("counter", "Drafted tokens that were emitted."),
    "vllm:spec_decode_num_accepted_tokens_per_pos": ("counter", "The same, by depth in the tree, from 0."),
    "specdec:rounds": ("counter", "Rounds of the engine, each of which serves all rows."),
    "specdec:sequence_rounds": ("counter", "Rounds of single sequences."),
    "specdec:round_tokens": ("counter", "Tokens that rounds emitted: all but the first of every sequence."),
    "specdec:tau": ("gauge", "round_tokens / sequence_rounds since the start."),
    "specdec:requests_refused": ("counter", "HTTP requests that were refused, by status."),
    "vllm:time_to_first_token_seconds": ("histogram", "From the arrival of a sequence to its first token."),
    "vllm:inter_token_latency_seconds": ("histogram", "Between two steps that gave a sequence tokens."),
    "vllm:request_queue_time_seconds": ("histogram", "From the arrival of a sequence to its prefill."),
    "vllm:e2e_request_latency_seconds": ("histogram", "From the arrival of a sequence to its end."),
}


class Histogram:
    """How many values lie at or below each of the bounds `SECONDS`."""

    def __init__(self) -> None:
        self.counts, self.sum = [0] * (len(SECONDS) + 1), 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(SECONDS, value)] += 1
        self.sum += value


class Metrics:
    """All series of `FAMILIES`. Any thread may add to them and read them; whoever holds `lock` sees no half of an
    update."""

    def __init__(self, model: str, positions: int = 0):
        """model: the label `model_name` of all series. positions: the deepest level of a tree, whose counters are there
        from the start."""
        self.model, self.lock = model, threading.RLock()
        self.values = {(name, ()): 0.0 for name, (kind, _) in FAMILIES.items() if kind != "histogram"}
        for labelled in ("request_success", "spec_decode_num_accepted_tokens_per_pos"):
            del self.values[f"vllm:{labelled}", ()]
        del self.values["specdec:requests_refused", ()]
        for position in range(positions):
            self.add("vllm:spec_decode_num_accepted_tokens_per_pos", 0, position=position)
        for reason in ("stop", "length", "abort", "error"):
            self.add("vllm:request_success", 0, finished_reason=reason)
        self.histograms = {name: Histogram() for name, (kind, _) in FAMILIES.items() if kind == "histogram"}

    def add(self, name: str, amount: float = 1, **labels) -> None:
        with self.lock:
            key = name, tuple(labels.items())
            self.values[key] = self.values.get(key, 0.0) + amount

    def set(self, name: str, value: float) -> None:
        with self.lock:
            self.values[name, ()] = value

    def observe(self, name: str, seconds: float) -> None:
        with self.lock:
            self.histograms[name].add(seconds)

    def value(self, name: str, **labels) -> float:
        return self.values.get((name, tuple(labels.items())), 0.0)

    def text(self) -> str:
        """Every series, as a scrape reads it."""
        with self.lock:
            rounds = self.value("specdec:sequence_rounds")
            self.set("specdec:tau", self.value("specdec:round_tokens") / rounds if rounds else 0.0)
            return "".join(line + "\n" for name in FAMILIES for line in self._family(name))

    def _family(self, name: str) -> list[str]:
        kind, says = FAMILIES[name]
        shown = f"{name}_total" if kind == "counter" else name
        lines = [f"# HELP {shown} {says}", f"# TYPE {shown} {kind}"]
        if kind != "histogram":
            found = [(labels, value) for (of, labels), value in self.values.items() if of == name]
            return lines + [f"{shown}{self._labels(*labels)} {value}" for labels, value in found]
        histogram, below = self.histograms[name], 0
        for bound, count in zip((*SECONDS, "+Inf"), histogram.counts, strict=True):
            below += count
            lines.append(f"{name}_bucket{self._labels(('le', bound))} {below}")
        return [*lines, f"{name}_sum{self._labels()} {histogram.sum}", f"{name}_count{self._labels()} {below}"]

    def _labels(self, *labels: tuple) -> str:
        escaped = ((key, str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n"))
                   for key, value in (("model_name", self.model), ("engine", 0), *labels))  # fmt: skip
        return "{" + ",".join(f'{key}="{value}"' for key, value in escaped) + "}"


def count(
    metrics: Metrics, report: RoundReport, live: list[bool], drafts: list[int], prefixes: Prefixes | None = None
) -> None:
    """Count the tokens of a step, and what was drafted and accepted in it.

    live: which rows had not ended before. drafts: `drafted_of`. prefixes: what is kept of prompts."""
    add, emitted = metrics.add, sum(map(len, report.emitted))
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
    for alive, accepted, drafted in zip(live, report.accepted, drafts, strict=True):
        if alive and drafted:
            add("vllm:spec_decode_num_drafts")
            add("vllm:spec_decode_num_draft_tokens", drafted)
            add("vllm:spec_decode_num_accepted_tokens", accepted)
            for position in range(accepted):
                add("vllm:spec_decode_num_accepted_tokens_per_pos", position=position)


def drafted_of(report: RoundReport, steps: int) -> list[int]:
    """How many tokens a round drafted for each row. steps: levels of the engine's tree."""
    if report.prefill:
        return [0] * len(report.rows)
    if report.levels is None:  # a recorded round shows no tree, and every row has a whole one
        return [report.nodes - 1] * len(report.rows)
    if report.tree is None:  # one token a level where not all of them count: exact for chains
        return [report.nodes - 1 if most >= steps else min(most, report.nodes - 1) for most in report.levels]
    depth = report.tree.depth.tolist()
    return [sum(0 < d <= most for d in row) for row, most in zip(depth, report.levels, strict=True)]
