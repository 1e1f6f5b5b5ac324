"""Explain in words why acceptance is low.

    specdec trace diagnose TRACE --target TARGET --draft DRAFT

Reads a trace of `specdec generate --trace`: acceptance by depth and context, the draft vocabulary, and whether the
drafter's probabilities are right. Then tests whether the checkpoint drafts better when it is read another way, as
`specdec checkpoint check` does. Prints one line for each cause with what to do, the likely causes first.
"""

import argparse
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from specdec.cli.parser import read_flags
from specdec.contracts import Drafter, DraftState
from specdec.drafters.formats import check, verdict
from specdec.engine.recorder import TracedRound, TracedRow
from specdec.engine.report import RoundReport
from specdec.engine.trace_files import read_trace
from specdec.lab.output import stage
from specdec.lab.traces.metrics import Rows, acceptance_by_depth, bootstrap, entry, rounds_of, tau
from specdec.lab.wrapped import WrappedDrafter
from specdec.model_settings import ModelSettings
from specdec.text import read_prompts

CONTEXTS = (0, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)  # tokens; edges of the bins of `by_context`
NATS = (0.0, 0.1, 0.5, 1.0, 2.0, 3.0, 4.0, math.inf)  # entropy; edges of the bins of `Probe.entropy`

COVERED = 0.98  # of the target's tokens that a draft vocabulary should hold
LOW, HIGH = 0.6, 0.5  # acceptance of the first token below this is low, and of the last level above this is high
SHORTER = 0.8  # tau at long contexts, of that at short ones, below which the context matters
OFF = 0.15  # expected calibration error that is large
FEW = 200  # rounds of a bin of contexts that count
PROBED = 6  # prompts of the check of the checkpoint

# Numbers from traces, in plain JSON values; None: there was no data


def calibration(rows: Rows, bins: int = 10) -> dict:
    """Compare the drafter's probabilities with its accuracy, over drafted tokens whose parent was accepted.

    Returns {"bins": [{"draft", "accepted", "count"}], "error"}. Bins are of equal width in the drafter's probability:
    draft is its mean, accepted the share of tokens accepted. error is the expected calibration error (arXiv
    1706.04599), the mean over tokens of |accepted - draft| of their bin. Without probabilities there are no bins.
    """
    examined = [pair for row in rows for r in row.rounds if r.tree is not None for pair in _examined(r)]
    out = _binned("draft", examined, [*(i / bins for i in range(bins)), math.inf])
    off = sum(abs(b["accepted"] - b["draft"]) * b["count"] for b in out)
    return {"bins": out, "error": off / len(examined) if examined else None}


def _examined(r: TracedRound) -> Iterator[tuple[float, bool]]:
    """(probability under the drafter given its parent, was it accepted?) of each child of an accepted node."""
    tree: Any = r.tree  # which every caller has looked for
    path, parents, logq = set(r.path), tree.parents.tolist(), tree.logq.tolist()
    for node in range(1, len(parents)):
        own = logq[node] - logq[parents[node]]
        if parents[node] in path and not math.isnan(own):
            yield math.exp(min(own, 0.0)), node in path


def by_context(rows: Rows, *, resamples: int = 1000) -> list[dict]:
    """Tau by the tokens of context that a round began with, with 95 % intervals over questions.

    Returns [{"from", "to", "rounds", "value", "low", "high"}] without the bins that have no round.
    """
    out = []
    for low, high in pairwise((*CONTEXTS, math.inf)):
        some = [replace(row, rounds=[r for r in row.rounds if low <= r.context < high]) for row in rows]
        if count := rounds_of(some):
            ends = bootstrap(tau, some, resamples=resamples)[0]
            bounds = {"from": low, "to": high if math.isfinite(high) else None, "rounds": count}
            out.append(bounds | entry(tau(some), *ends))
    return out


def coverage(rows: Rows, drafter: Drafter, decode: Callable[[int], str], most: int = 10) -> dict:
    """How much of what the target said the drafter could have proposed.

    Returns {"share", "tokens", "size", "missed"}. missed holds the most frequent of the other tokens as [text, count].
    """
    said = Counter(token for row in rows for token in row.tokens)
    total = sum(said.values())
    known = drafter.vocab.contains().tolist()
    if said and max(said) >= len(known):
        raise ValueError(
            f"token {max(said)} is beyond the {len(known)} of the target: the trace belongs to another target"
        )
    missed = sorted(((token, n) for token, n in said.items() if not known[token]), key=lambda both: (-both[1], both[0]))
    lost = sum(count for _, count in missed)
    known_share = 1 - lost / total if total else None
    named = [[decode(token), count] for token, count in missed[:most]]
    return {"share": known_share, "tokens": total, "size": drafter.vocab.size, "missed": named}


def examples(rows: Rows, decode: Callable[[int], str]) -> list[dict]:
    """Return up to three rounds with drafted tokens: the first with the most, the median and no accepted tokens.

    Each has "question", "context", "tokens", "parents", "draft", "target", "path" and "bonus". "draft" and "target"
    hold each token's probability given its parent, under the drafter (None if the policy does not give it) and the
    target. "bonus" is the text of the token after the path, None if the text ended before.
    """
    found = [(row, r) for row in rows for r in row.rounds if r.drafted]
    counts = sorted(r.accepted for _, r in found)
    wanted = list(dict.fromkeys((counts[-1], counts[len(counts) // 2], 0))) if counts else []
    firsts = [next((both for both in found if both[1].accepted == count), None) for count in wanted]
    return [_example(*both, decode) for both in firsts if both is not None]


def _example(row: TracedRow, r: TracedRound, decode: Callable[[int], str]) -> dict:
    tree: Any = r.tree
    parents, logq = tree.parents.tolist(), tree.logq.tolist()
    own = [math.exp(min(q - logq[parent], 0.0)) for q, parent in zip(logq, parents, strict=True)]
    return {
        "question": row.question,
        "context": r.context,
        "tokens": [decode(token) for token in tree.tokens.tolist()],
        "parents": parents,
        "draft": [None if math.isnan(q) else round(q, 4) for q in own],
        "target": [round(p, 4) for p in tree.logp.exp().tolist()],
        "path": r.path,
        "bonus": decode(r.emitted[-1]) if len(r.emitted) == len(r.path) else None,
    }


# What traces do not hold


class Probe(WrappedDrafter):
    """A drafter and an observer at once, for `Engine(target, probe, tree)` and `generate(..., observer=probe)`.

    It drafts as the drafter that it holds, and notes the hidden states of each step and the entropies where something
    was drafted. It takes one row at a time. It waits for the device, so the times of such a decoding mean nothing.
    """

    def __init__(self, drafter: Drafter):
        """Draft with `drafter` and record nothing yet."""
        super().__init__(drafter)
        self.hidden: dict[int, list[Tensor]] = {}  # norms by step; step 0 is the state from the target's own features
        self.target: list[tuple[float, bool]] = []  # (entropy of the target, was a child accepted?) of examined places
        self.draft: list[tuple[float, bool]] = []  # (entropy of the drafter, was a child accepted?) of roots
        self._root, self._next = math.nan, math.nan  # entropy of the drafter at this round's root and at the next one

    @override
    def admit(self, row: int, first: Tensor, feats: Tensor | None, tokens: Tensor, n: Tensor) -> DraftState:
        return self._root_state(super().admit(row, first, feats, tokens, n))

    @override
    def extend(self, feats: Tensor | None, tokens: Tensor, n: Tensor, max_len: int) -> DraftState:
        return self._root_state(super().extend(feats, tokens, n, max_len))

    def _root_state(self, state: DraftState) -> DraftState:
        self._root, self._next = self._next, float(_entropy(state.logits[0, 0]))
        self._note(0, state)
        return state

    @override
    def step(self, tokens: Tensor, hidden: Tensor, level: int, ancestors: Tensor) -> DraftState:
        state = super().step(tokens, hidden, level, ancestors)
        self._note(level, state)
        return state

    def __call__(self, report: RoundReport) -> None:
        """Record the target's and the drafter's entropies in a round. Raises ValueError for more than one row."""
        if report.tree is None:
            return
        if len(report.rows) != 1:
            raise ValueError("a probe takes one row at a time")
        path = report.verdict.path[0, : int(report.verdict.n[0])].tolist()
        parents = set(report.tree.parents[0, 1:].tolist())
        entropy = _entropy(report.logits[0, path]).tolist()
        for place, node in enumerate(path):
            if node in parents:  # else it has no drafted children
                self.target.append((entropy[place], place + 1 < len(path)))
        if 0 in parents:
            self.draft.append((self._root, len(path) > 1))

    def _note(self, step: int, state: DraftState) -> None:
        # What n-grams and draft models keep of a position are numbers of another kind, no hidden state.
        if state.hidden.is_floating_point() and state.hidden.shape[-1] > 1:
            self.hidden.setdefault(step, []).append(state.hidden[0].float().norm(dim=-1).flatten().cpu())

    def norms(self) -> list[dict]:
        """Return norms of the hidden state by step: "step", "mean", "low", "high" (10th, 90th percentile) and "count".

        A state that grows or shrinks with every step leaves the range seen in training.
        """
        out = []
        for step, parts in sorted(self.hidden.items()):
            values = torch.cat(parts).double()
            low, high = values.quantile(torch.tensor([0.1, 0.9], dtype=torch.float64)).tolist()
            out.append({"step": step, "mean": values.mean().item(), "low": low, "high": high, "count": len(values)})
        return out

    def entropy(self) -> dict[str, list[dict]]:
        """Return acceptance by entropy in nats at temperature 1: bins of "entropy", "accepted" and "count".

        "target" has the target's entropy where it chose the next token, "draft" the drafter's at the root.
        """
        return {name: _binned("entropy", getattr(self, name), NATS) for name in ("target", "draft")}


def _entropy(logits: Tensor) -> Tensor:
    """Logits [...,V] -> nats [...]; logits of -inf count as nothing."""
    logp = logits.float().log_softmax(-1)
    return -(logp.exp() * logp.clamp(min=-1e4)).sum(-1)


def _binned(name: str, seen: list[tuple[float, bool]], edges: Sequence[float]) -> list[dict]:
    """Means of what was seen, and shares accepted, of the bins that are not empty."""
    out = []
    for low, high in pairwise(edges):
        if group := [(value, taken) for value, taken in seen if low <= max(value, 0.0) < high]:
            mean, share = (sum(x) / len(group) for x in zip(*group, strict=True))
            out.append({name: mean, "accepted": share, "count": len(group)})
    return out


def causes(rows: Rows, drafter: Drafter, decode: Callable[[int], str]) -> list[str]:
    """Return a sentence for each cause of low acceptance that a trace shows, with what to do."""
    found, shares = [], acceptance_by_depth(rows)
    known = coverage(rows, drafter, decode, most=5)
    if known["share"] is not None and known["share"] < COVERED:
        missed = ", ".join(repr(text) for text, _ in known["missed"])
        found.append(
            f"The draft vocabulary of {known['size']} tokens lacks {1 - known['share']:.1%} of the target's tokens, "
            f"such as {missed}: train with a larger drafter.draft_vocab_size, or decode with another --token-map."
        )
    bins = [one for one in by_context(rows, resamples=20) if one["rounds"] >= FEW]
    if len(bins) > 1 and bins[-1]["value"] < SHORTER * bins[0]["value"]:
        found.append(
            f"tau falls from {bins[0]['value']:.2f} to {bins[-1]['value']:.2f} beyond {bins[-1]['from']} tokens of "
            "context: train on longer conversations (data.max_length)."
        )
    error = calibration(rows)["error"]
    if error is not None and error > OFF:
        found.append(
            f"The drafter's probabilities are off by {error:.0%}, so a dynamic tree grows at the wrong places: use a "
            "chain or a static tree (specdec tune tree), or train longer."
        )
    if shares and shares[0] < LOW:
        found.append(
            f"The first drafted token is accepted in {shares[0]:.0%} of the rounds: the drafter does not know these "
            "texts. Train it further on the target's own answers to such prompts (`specdec data regenerate`, then "
            "`specdec train --from DRAFT`)."
        )
    elif len(shares) > 1 and shares[-1] > HIGH:
        found.append(f"{shares[-1]:.0%} of the rounds accept all {len(shares)} levels: draft deeper, --steps.")
    return found


def run(args: argparse.Namespace) -> None:
    """Run `specdec trace diagnose`."""
    traces = {folder: read_trace(folder) for folder in args.traces}
    rows = [row for trace in traces.values() for row in trace.rows]
    if not any(r.drafted for row in rows for r in row.rounds):
        raise ValueError(
            f"no round of {args.traces[0]} drafted anything: record answers of several tokens, with a drafter"
        )
    models = read_flags(ModelSettings, args)
    target = models.load_target()
    drafter = models.load_drafter(target)
    kind = type(drafter).__name__
    for folder, trace in traces.items():
        made = trace.settings.get("drafter")
        if isinstance(made, dict) and made.get("class") != kind:
            raise ValueError(
                f"{folder} was drafted by a drafter of class {made.get('class')}, and not {kind}: give its drafter as "
                "--draft"
            )
    found = causes(rows, drafter, lambda token: target.tokenizer.decode([token]))
    if args.draft is not None and not args.draft.startswith("ngram"):
        stage(f"reading {args.draft} in other ways, on {PROBED} prompts")
        prompts = read_prompts(check.PROMPTS)[:PROBED]
        report = check.check(target, args.draft, prompts, allow_nonfinite=args.allow_nonfinite)
        if report.better_reading is not None:
            found.insert(0, f"The checkpoint is read otherwise than it was trained. {verdict.verdict(report)}")
    found = found or ["Nothing stands out: a larger drafter, more data or longer training may help."]
    if args.json:
        print(json.dumps({"tau": tau(rows), "acceptance_by_depth": acceptance_by_depth(rows), "causes": found}))
        return
    shares = "  ".join(f"{depth}: {share:.0%}" for depth, share in enumerate(acceptance_by_depth(rows), 1))
    print(f"tau {tau(rows):.2f}; rounds that accepted at least so many drafted tokens: {shares}")
    print("\n".join(f"- {sentence}" for sentence in found))
