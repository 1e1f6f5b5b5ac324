"""The best setting of a pair on this machine: costs measured once, acceptance replayed, the best few tried for real."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from specdec.engine.engine import Engine
from specdec.recording import Accepted, Recording
from specdec.structs import Sampling
from specdec.trees import Tree
from specdec.tuning.costs import Costs
from specdec.tuning.oracle import Prediction, clairvoyant, predict
from specdec.tuning.timing import Progress, in_turns, silent


def predict_all(
    costs: Costs,
    recording: Recording,
    accepted: Mapping[Tree, Accepted],
    prompts: list[int],
    batch: int = 1,
) -> tuple[Prediction, list[Prediction]]:
    """Predict plain decoding and every tree; the trees come fastest first. accepted: of every tree, by root."""
    replays = recording.replay_many(list(accepted.values()))
    plain = predict(costs, None, replays[0].emitted, prompts, batch)
    both = zip(accepted, replays, strict=True)
    found = [predict(costs, tree, r.emitted, prompts, batch, r.drafted) for tree, r in both]
    return plain, sorted(found, key=lambda p: -p.tokens_per_second)


def finalists(ranking: list[Prediction], count: int, within: float = 0.1) -> list[Prediction]:
    """The `count` trees to try for real.

    First come the best of every topk and the best static tree, as far as their predictions lie `within` this share of
    the best of all: this reveals an error common to one topk. The best of the rest follow.
    """
    least = (1 - within) * ranking[0].tokens_per_second
    firsts: dict[Any, Prediction] = {}
    for p in ranking:
        if p.tree is not None and p.tokens_per_second >= least:
            firsts.setdefault("static" if p.tree.fixed else p.tree.topk, p)
    first = list(firsts.values())
    return [*first, *(p for p in ranking if p not in first)][:count]


@dataclass(frozen=True)
class MeasuredRate:
    """What decoding with one tree did."""

    tree: Tree | None
    tokens_per_second: float
    tau: float
    texts: list[list[int]]  # token ids by prompt


def measure_rates(
    target,
    drafter,
    prompts: list[list[int]],
    trees: Sequence[Tree | None],
    *,
    batch: int = 1,
    max_new_tokens: int = 64,
    sampling: Sampling | None = None,
    repeats: int = 3,
    seed: int = 0,
    progress: Progress = silent,
) -> list[MeasuredRate]:
    """Decode every batch of prompts with every tree `repeats` times, in turns, after one batch of warm-up.

    prompts: token ids. The time of a batch is the median of its repeats.
    """
    engines = [Engine(target) if tree is None else Engine(target, drafter, tree) for tree in trees]
    groups = [prompts[start : start + batch] for start in range(0, len(prompts), batch)]
    how: dict[str, Any] = {"sampling": sampling, "seed": seed}
    for engine in engines:
        engine.generate(groups[0], max_new_tokens=8, **how)
    how["max_new_tokens"] = max_new_tokens
    results = in_turns([partial(e.generate, group, **how) for group in groups for e in engines], repeats, progress)
    found = []
    for place, tree in enumerate(trees):
        by_group = results[place :: len(trees)]
        rows = [row for turns in by_group for row in turns[0].rows]
        tokens = sum(len(row.tokens) - 1 for row in rows)
        rounds = sum(row.trace.rounds for row in rows)
        seconds = sum(statistics.median(result.decode_seconds for result in turns) for turns in by_group)
        found.append(MeasuredRate(tree, tokens / seconds, tokens / max(rounds, 1), [row.tokens for row in rows]))
    return found


@dataclass(frozen=True)
class Tuned:
    """Predictions of every tree, and what plain decoding and the best few trees did for real."""

    plain: Prediction
    ranking: list[Prediction]
    measured: list[tuple[Prediction, MeasuredRate]]  # plain decoding first
    bound: float | None = None  # tokens/s that no choice of trees by round can exceed (`clairvoyant`); of one row

    @property
    def best(self) -> tuple[Prediction, MeasuredRate]:
        """The fastest of what was tried, plain decoding included."""
        return max(self.measured, key=lambda both: both[1].tokens_per_second)

    @property
    def best_draft(self) -> tuple[Prediction, MeasuredRate]:
        """The fastest of what was tried with a tree."""
        return max(self.measured[1:], key=lambda both: both[1].tokens_per_second)

    @property
    def verdict(self) -> str:
        """What to do, in one sentence."""
        _, draft = self.best_draft
        plain = self.measured[0][1].tokens_per_second
        entries = {} if draft.tree is None else draft.tree.entries()
        words = ", ".join(f"{name} {value}" for name, value in entries.items())
        ratio = draft.tokens_per_second / plain
        if self.best[0].tree is None:
            return (
                f"decode plainly: no setting beats plain decoding ({plain:.1f} tokens/s) here; the best one that "
                f"drafts, {words}, reaches {ratio:.2f} of it"
            )
        return f"{words}: {draft.tokens_per_second:.1f} tokens/s, {ratio:.2f} times plain decoding"

    def report(self) -> dict:
        """Return what was predicted and what was measured, in values that YAML has."""
        tried = [
            {
                "setting": "plain" if p.tree is None else str(p.tree),
                "predicted_tokens_per_second": round(p.tokens_per_second, 2),
                "measured_tokens_per_second": round(m.tokens_per_second, 2),
                "predicted_tau": round(p.tau, 4),
                "measured_tau": round(m.tau, 4),
            }
            for p, m in self.measured
        ]
        best = tried[self.measured.index(self.best)]
        return {
            "verdict": self.verdict,
            "predicted_tokens_per_second": best["predicted_tokens_per_second"],
            "measured_tokens_per_second": best["measured_tokens_per_second"],
            "plain_tokens_per_second": tried[0]["measured_tokens_per_second"],
            "best_draft": str(self.best_draft[0].tree),
            "settings_predicted": len(self.ranking),
            "clairvoyant_tokens_per_second": self.bound and round(self.bound, 2),
            "tried": tried,
        }


def tune(
    costs: Costs,
    recording: Recording,
    trees: Sequence[Tree],
    target,
    drafter,
    prompts: list[list[int]],
    *,
    batch: int = 1,
    tries: int = 4,
    **how,
) -> Tuned:
    """Predict every tree, and decode with the best `tries` of them and plainly.

    prompts: token ids; `recording` holds one text of each, in this order. how: as in `measure_rates`.
    """
    lengths = [len(p) for p in prompts]
    accepted = {tree: tree.replay(recording) for tree in trees}
    plain, ranking = predict_all(costs, recording, accepted, lengths, batch)
    tried = [plain, *finalists(ranking, tries)]
    found = measure_rates(target, drafter, prompts, [p.tree for p in tried], batch=batch, **how)
    bound = None
    if batch == 1:
        known = {tree: (a.accepted.numpy(), a.levels.numpy()) for tree, a in accepted.items()}
        bound = clairvoyant(costs, known, recording.roots.tolist(), lengths)
    return Tuned(plain, ranking, list(zip(tried, found, strict=True)), bound)
