"""The best setting of a pair on this machine: costs measured once, acceptance replayed, the best few tried for real."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specdec.engine.engine import Engine
from specdec.lab.cost.model import CostModel
from specdec.recording import Accepted, Recording
from specdec.structs import Sampling
from specdec.trees import Chain, Tree


@dataclass(frozen=True)
class Prediction:
    """What decoding with one tree is expected to do."""

    tree: Tree | None  # None: plain decoding
    tokens_per_second: float
    tau: float
    seconds_a_round: float


def round_contexts(emitted: list[list[int]], prompts: list[int], batch: int) -> Iterator[tuple[int, np.ndarray]]:
    """For each batch of consecutive questions its size, and the tokens of the longest row before each round [rounds].

    emitted: tokens by question and round. prompts: lengths in tokens. A batch goes on until its last row has ended."""
    for start in range(0, len(emitted), batch):
        rows, lengths = emitted[start : start + batch], prompts[start : start + batch]
        most = max(map(len, rows))
        filled = [np.pad(row, (0, most - len(row))) for row in rows]
        before = np.cumsum(filled, axis=1) - filled
        yield len(rows), (before + np.array(lengths)[:, None]).max(0)


def predict(
    costs: CostModel,
    tree: Tree | None,
    emitted: list[list[int]],
    prompts: list[int],
    batch: int = 1,
    drafted: list[list[int]] | None = None,
) -> Prediction:
    """Predict tokens/s of decoding without the prefill and its token, as `Generation.tokens_per_second` counts.

    emitted: tokens by question and round with this tree; for plain decoding with any tree. prompts: lengths in
    tokens. drafted: levels by question and round; None: all rounds draft the whole tree.
    Raises ValueError if no question was decoded beyond its first token."""
    tokens, taken = sum(map(sum, emitted)), sum(map(len, emitted))
    if not tokens:
        raise ValueError("no question was decoded beyond its first token: nothing can be predicted")
    if tree is None:
        emitted, taken = [[1] * sum(row) for row in emitted], tokens
    seconds, rounds = 0.0, 0
    for number, (size, contexts) in enumerate(round_contexts(emitted, prompts, batch)):
        if tree is None:
            times = costs.plain(contexts, size)
        elif drafted is None:
            times = costs.round(tree, contexts, size)
        else:
            rows = drafted[number * batch : (number + 1) * batch]
            levels = np.max([np.pad(row, (0, len(contexts) - len(row))) for row in rows], axis=0)
            times = _times(costs, tree, contexts, size, levels)
        seconds += float(np.sum(times))
        rounds += len(contexts)
    return Prediction(tree, tokens / seconds, tokens / taken, seconds / rounds)


def _times(costs: CostModel, tree: Tree, contexts: np.ndarray, size: int, levels: np.ndarray) -> np.ndarray:
    """Seconds of a batch's rounds, each of which drafts so many levels. A static tree without its last levels is taken
    to cost what the whole one does."""
    times = np.empty(len(contexts))
    for deep in np.unique(levels):
        at = levels == deep
        cut = Chain(int(deep)) if isinstance(tree, Chain) and deep else tree
        times[at] = (costs.round if deep else costs.empty)(cut, contexts[at], size)
    return times


def predict_all(
    costs: CostModel,
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


def clairvoyant(costs: CostModel, recording: Recording, accepted: Mapping[Tree, Accepted], prompts: list[int]) -> float:
    """Return the tokens/s of a row that drafts in every round with the best of these trees, or not at all.

    It knows the texts, so no way to choose among these trees by round is faster. Found text by text from its end."""
    seconds = tokens = 0.0
    for start, roots, prompt in zip(recording.starts.tolist(), recording.roots.tolist(), prompts, strict=True):
        here, contexts = slice(start, start + roots), prompt + np.arange(roots)
        times = [costs.plain(contexts, 1)]
        times += [_times(costs, tree, contexts, 1, a.levels[here].numpy()) for tree, a in accepted.items()]
        emits = np.stack([np.ones(roots, int), *(1 + a.accepted[here].numpy() for a in accepted.values())])
        least = np.zeros(roots + 1)  # seconds from each root to the end
        for root in range(roots - 1, -1, -1):
            after = least[np.minimum(root + emits[:, root], roots)]
            least[root] = min(time[root] + rest for time, rest in zip(times, after, strict=True))
        seconds, tokens = seconds + least[0], tokens + roots
    return tokens / seconds


def finalists(ranking: list[Prediction], count: int, within: float = 0.1) -> list[Prediction]:
    """The `count` trees to try for real.

    First come the best of every topk and the best static tree, as far as their predictions lie `within` this share of
    the best of all: an error common to one topk is found out so. The best of the rest follow."""
    least = (1 - within) * ranking[0].tokens_per_second
    firsts = {}
    for p in ranking:
        if p.tokens_per_second >= least:
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
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> list[MeasuredRate]:
    """Decode every batch of prompts with every tree `repeats` times, after one batch of warm-up.

    prompts: token ids. The time of a batch is the median of its repeats. Trees take turns on each batch, and another
    tree begins each time, so that whatever else the machine does hits all of them."""
    engines = [Engine(target) if tree is None else Engine(target, drafter, tree) for tree in trees]
    groups = [prompts[start : start + batch] for start in range(0, len(prompts), batch)]
    times = [[[] for _ in groups] for _ in trees]
    rows = [[] for _ in trees]
    for engine in engines:
        engine.generate(groups[0], max_new_tokens=8, sampling=sampling, seed=seed)
    for repeat in range(repeats):
        for place, group in enumerate(groups):
            first = (repeat + place) % len(engines)
            for i in (*range(first, len(engines)), *range(first)):
                result = engines[i].generate(group, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed)
                times[i][place].append(result.decode_seconds)
                if repeat == 0:
                    rows[i] += result.rows
            progress(repeat * len(groups) + place + 1, repeats * len(groups))
    found = []
    for tree, by_group, own in zip(trees, times, rows, strict=True):
        tokens = sum(len(row.tokens) - 1 for row in own)
        rounds = sum(row.trace.rounds for row in own)
        seconds = sum(statistics.median(group) for group in by_group)
        texts = [row.tokens for row in own]
        found.append(MeasuredRate(tree, tokens / seconds, tokens / max(rounds, 1), texts))
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
        words = ", ".join(f"{name} {value}" for name, value in draft.tree.entries().items())
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
    costs: CostModel,
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

    prompts: token ids; `recording` holds one text of each, in this order. how: as in `measure_rates`."""
    lengths = [len(p) for p in prompts]
    accepted = {tree: tree.replay(recording) for tree in trees}
    plain, ranking = predict_all(costs, recording, accepted, lengths, batch)
    tried = [plain, *finalists(ranking, tries)]
    found = measure_rates(target, drafter, prompts, [p.tree for p in tried], batch=batch, **how)
    bound = clairvoyant(costs, recording, accepted, lengths) if batch == 1 else None
    return Tuned(plain, ranking, list(zip(tried, found, strict=True)), bound)
