"""Traces: what every round of a decoding drafted, how likely the target found it, and what was accepted."""

import json
import platform
from collections import abc
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import torch
import transformers
from torch import Tensor

from specdec import __version__
from specdec.contracts import Drafter
from specdec.engine.report import Clock, Observer, RoundReport, SilentClock
from specdec.engine.sequence import Sequence
from specdec.engine.traces import RowTrace
from specdec.machine import matmul_precision
from specdec.sampling.filters import filtered_probs
from specdec.sampling.noise import Seed
from specdec.structs import DraftTree, Sampling, SamplingBatch, Verifier
from specdec.verify.walk import of_parent


@dataclass
class TracedTree:
    """What one round drafted for one row: N nodes, breadth first, node 0 the root. All on the CPU."""

    tokens: Tensor  # [N] int32, target vocabulary ids
    parents: Tensor  # [N] int32, the root its own
    logq: Tensor  # [N] fp32 log-probability of the path under the drafter, root 0; nan if the policy has none
    logp: Tensor  # [N] fp32 log-probability of the token under the target's softmax (any penalties taken off); root 0
    p: Tensor  # [N] fp32 its probability in the filtered distribution that was verified against; root 1


NODE_FIELDS = [f.name for f in fields(TracedTree)]


@dataclass
class TracedRound:
    """One round of one row. A round without a tree decoded plainly: its path is the root alone."""

    context: int  # tokens before this round, prompt and root included
    path: list[int]  # accepted nodes, root first, before any cut at the end of the text
    emitted: list[int]  # tokens that became text: what was accepted and the bonus, cut at the end of the text
    seconds: dict[str, float]  # by part, of the whole batch
    tree: TracedTree | None
    experts: float | None = None  # distinct ones that verifying took, of the whole batch, mean over layers; None: dense

    @property
    def accepted(self) -> int:
        """Number of accepted drafted tokens."""
        return len(self.path) - 1

    @property
    def drafted(self) -> int:
        """Nodes that the target verified, the root not counted."""
        return 0 if self.tree is None else len(self.tree.tokens) - 1


@dataclass
class TracedRow:
    """One sequence. Rows of the same `call` were decoded together, and share the seconds of their rounds."""

    question: str  # what intervals resample: the turns of one conversation share it
    category: str | None
    call: int
    steps: int  # no tree was deeper; 0 for plain decoding
    sampling: Sampling
    prompt: list[int]
    first: int  # the token that came from the prefill
    finish: str | None  # as `specdec.engine.sequence.Sequence` has it; None if the decoding was interrupted
    prefill_seconds: float  # of the whole batch
    seed: Seed = (0, 0)  # of all that was drawn for it
    rounds: list[TracedRound] = field(default_factory=list)

    def add(self, made: TracedRound) -> None:
        """Append a round, and drop the cached metrics of the earlier rounds."""
        self.rounds.append(made)
        for name in ("trace", "drafting", "drafted", "chains"):
            vars(self).pop(name, None)

    @property
    def tokens(self) -> list[int]:
        """All emitted tokens: the first one, from the prefill, and those of the rounds."""
        return [self.first, *(token for r in self.rounds for token in r.emitted)]

    @cached_property
    def trace(self) -> RowTrace:
        """Counts of the row, for metrics."""
        undrafted = sum(not r.drafted for r in self.rounds)
        return RowTrace([r.accepted for r in self.rounds], [len(r.emitted) for r in self.rounds], undrafted)

    @cached_property
    def drafting(self) -> RowTrace:
        """The rounds in which something was drafted."""
        drafted = [r for r in self.rounds if r.drafted]
        return RowTrace([r.accepted for r in drafted], [len(r.emitted) for r in drafted])

    @cached_property
    def drafted(self) -> list[int]:
        """Number of drafted tokens of each round."""
        return [r.drafted for r in self.rounds]

    @cached_property
    def chains(self) -> bool:
        """Whether only chains were drafted."""
        trees = [r.tree.parents for r in self.rounds if r.tree is not None]
        return all(torch.equal(p[1:], torch.arange(len(p) - 1, dtype=p.dtype)) for p in trees)


@dataclass
class Trace:
    """What was decoded, how, and with what."""

    settings: dict
    versions: dict[str, str]
    rows: list[TracedRow]


class Recorder(Observer):
    """An observer that records a trace of one or more calls. Its time counts as output, not as decoding."""

    def __init__(self, settings: dict | None = None):
        """Begin an empty trace. settings: describe the run, in JSON values; raises TypeError for others."""
        settings = json.loads(json.dumps(settings or {}))  # what JSON does not have fails now, and not after the run
        self._trace = Trace(settings, versions(), [])
        self._names: list[tuple[str, str | None]] | None = None
        self._rows: dict[Sequence, TracedRow] = {}  # of the sequences that have not ended
        self._clock: Clock | SilentClock | None = None  # of the call
        self._mark = 0  # where on the clock the next round begins
        self._reading = 0.0  # seconds of the parts of a prompt whose row has not joined yet

    @property
    def trace(self) -> Trace:
        """The trace so far."""
        for row, ours in self._rows.items():  # one that was aborted since the last report
            ours.finish = row.finish
        return self._trace

    def name(self, questions: abc.Sequence[str], categories: abc.Sequence[str | None] | None = None) -> None:
        """Name the rows of the next call. Without names they are numbered."""
        self._names = list(zip(questions, categories or [None] * len(questions), strict=True))

    def __call__(self, report: RoundReport) -> None:
        """Add a step to the trace."""
        if report.clock is not self._clock:
            self._clock, self._mark, self._reading = report.clock, 0, 0.0
        (self._begin if report.prefill else self._add)(report)
        for row, ours in list(self._rows.items()):
            ours.finish = row.finish
            if row.finish is not None:
                del self._rows[row]
        self._mark = report.clock.position  # the mark that ends the observers' time is yet to come

    def _begin(self, report: RoundReport) -> None:
        self._reading += report.clock.seconds(self._mark).get("prefill", 0.0)
        if not report.rows:
            return
        rows = self._trace.rows
        names = self._names or [(str(len(rows) + i), None) for i in range(len(report.rows))]
        if len(names) != len(report.rows):
            raise ValueError(f"{len(names)} questions were named, but {len(report.rows)} prompts are decoded")
        call = rows[-1].call + 1 if rows else 0
        seconds, self._reading, self._names = self._reading, 0.0, None
        for (question, category), row in zip(names, report.rows, strict=True):
            own = row.sampling, row.prompt, row.tokens[0], None, seconds, row.seed
            ours = TracedRow(question, category, call, 0, *own)
            self._rows[row] = ours
            rows.append(ours)

    def _add(self, report: RoundReport) -> None:
        seconds = report.clock.seconds(self._mark)
        trees: list[TracedTree | None] = [None] * len(report.rows)
        paths = [[0]] * len(report.rows)
        levels = report.levels or [0 if report.tree is None else report.tree.steps] * len(report.rows)
        if report.tree is not None:
            values = node_values(report.tree, report.logits, report.sampling).values()
            counts = (report.tree.depth <= report.tree.depth.new_tensor(levels)[:, None]).sum(1).tolist()
            rows = zip(zip(*values, strict=True), counts, strict=True)  # the nodes of the first levels come first
            trees = [TracedTree(*(value[:count] for value in row)) if count > 1 else None for row, count in rows]
            ends = report.verdict.n.tolist()
            paths = [path[:n] for path, n in zip(report.verdict.path.tolist(), ends, strict=True)]
        used = [len(chosen.unique()) for chosen in report.experts]
        experts = sum(used) / len(used) if used else None
        for row, emitted, path, tree, deep in zip(report.rows, report.emitted, paths, trees, levels, strict=True):
            if emitted:  # else the row had ended before
                ours, context = self._rows[row], len(row.prompt) + len(row.tokens) - len(emitted)
                ours.add(TracedRound(context, path, list(emitted), seconds, tree, experts))
                ours.steps = max(ours.steps, deep)


@torch.inference_mode()
def node_values(tree: DraftTree, logits: Tensor, sampling: Sampling | SamplingBatch) -> dict[str, Tensor]:
    """Return the fields of `TracedTree` for a batch, [B,N] each and on the CPU; logits [B,N,V] of the target."""
    logp = of_parent(tree, logits.float().log_softmax(-1))
    p = of_parent(tree, filtered_probs(logits, sampling))
    logp[:, 0], p[:, 0] = 0, 1
    values = {
        "tokens": tree.tokens.int(),
        "parents": tree.parents.int(),
        "logq": torch.full_like(p, torch.nan) if tree.logq is None else tree.logq.float().clone(),  # the tree is lent
        "logp": logp,
        "p": p,
    }
    return {name: value.cpu() for name, value in values.items()}


def describe(target, drafter: Drafter | None, tree: Any, verifier: Verifier) -> dict:
    """Return the parts of an engine as settings of a trace."""
    settings = {"target": target.name, "dtype": str(target.dtype), "device": str(target.device)}
    settings["matmul_precision"] = matmul_precision(target.device)
    if drafter is None:
        return settings
    shape = {"steps": tree.steps, "topk": tree.topk, "num_draft_tokens": tree.num_draft_tokens}
    return settings | {
        "drafter": {"class": type(drafter).__name__} | dict(drafter.conventions),
        "tree": {"class": type(tree).__name__} | shape,
        "verifier": str(verifier),
        "lossless": verifier.lossless,
    }


def versions() -> dict[str, str]:
    """Return the versions of specdec, torch, transformers and Python."""
    return {
        "specdec": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
