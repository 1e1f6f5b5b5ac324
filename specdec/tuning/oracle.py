"""Tokens per second by costs and replayed rounds: of decoding with one tree, and of the best choice by round."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specdec.trees import Chain, Tree
from specdec.tuning.costs import PLAIN, Costs, Kind


@dataclass(frozen=True)
class Prediction:
    """Expected result of decoding with one tree."""

    tree: Tree | None  # None: plain decoding
    tokens_per_second: float
    tau: float
    seconds_a_round: float


def round_contexts(emitted: list[list[int]], prompts: list[int], batch: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield for each batch of questions its size, and the tokens of the longest row before each round [rounds].

    emitted: tokens by question and round. prompts: lengths in tokens. A batch is consecutive questions, and runs until
    its last row has ended.
    """
    for start in range(0, len(emitted), batch):
        rows, lengths = emitted[start : start + batch], prompts[start : start + batch]
        most = max(map(len, rows))
        filled = [np.pad(row, (0, most - len(row))) for row in rows]
        before = np.cumsum(filled, axis=1) - filled
        yield len(rows), (before + np.array(lengths)[:, None]).max(0)


def predict(
    costs: Costs,
    tree: Tree | None,
    emitted: list[list[int]],
    prompts: list[int],
    batch: int = 1,
    drafted: list[list[int]] | None = None,
) -> Prediction:
    """Predict tokens/s of decoding without the prefill and its token, as `Generation.tokens_per_second` counts.

    emitted: tokens by question and round with this tree; for plain decoding with any tree. prompts: lengths in
    tokens. drafted: levels by question and round; None: all rounds draft the whole tree.

    Raises ValueError if no question was decoded beyond its first token.
    """
    tokens, taken = sum(map(sum, emitted)), sum(map(len, emitted))
    if not tokens:
        raise ValueError("no question was decoded beyond its first token: nothing can be predicted")
    if tree is None:
        emitted, taken = [[1] * sum(row) for row in emitted], tokens
    seconds, rounds = 0.0, 0
    for number, (size, contexts) in enumerate(round_contexts(emitted, prompts, batch)):
        levels = np.full(len(contexts), 0 if tree is None else tree.steps)
        if tree is not None and drafted is not None:
            rows = drafted[number * batch : (number + 1) * batch]
            levels = np.max([np.pad(row, (0, len(contexts) - len(row))) for row in rows], axis=0)
        seconds += float(np.sum(_times(costs, tree, contexts, size, levels)))
        rounds += len(contexts)
    return Prediction(tree, tokens / seconds, tokens / taken, seconds / rounds)


def _times(costs: Costs, tree: Tree | None, contexts: np.ndarray, size: int, levels: np.ndarray) -> np.ndarray:
    """Return the seconds of a batch's rounds, each of which drafts so many levels. Without levels a round is plain.

    A static tree without its last levels is assumed to cost the same as the whole tree.
    """
    times = np.empty(len(contexts))
    for deep in np.unique(levels):
        at = levels == deep
        cut = Chain(int(deep)) if deep and isinstance(tree, Chain) else tree
        times[at] = costs.seconds(Kind.of(cut) if deep else PLAIN, size, contexts[at])
    return times


def clairvoyant(
    costs: Costs, accepted: Mapping[Tree, tuple[np.ndarray, np.ndarray]], roots: Sequence[int], prompts: list[int]
) -> float:
    """Return the tokens/s of a row that drafts in every round with the best of these trees, or not at all.

    It knows the texts, so no way to choose among these trees by round is faster. Found text by text from its end.

    accepted: for each tree, drafted tokens that are accepted and levels that are drafted, at all roots.
    roots: number of roots of each text. prompts: lengths in tokens.
    """
    seconds, start = 0.0, 0
    for count, prompt in zip(roots, prompts, strict=True):
        here, contexts = slice(start, start + count), prompt + np.arange(count)
        times = [_times(costs, None, contexts, 1, np.zeros(count, int))]
        times += [_times(costs, tree, contexts, 1, levels[here]) for tree, (_, levels) in accepted.items()]
        emits = np.stack([np.ones(count, int), *(1 + taken[here] for taken, _ in accepted.values())])
        least = np.zeros(count + 1)  # seconds from each root to the end
        for root in range(count - 1, -1, -1):
            after = least[np.minimum(root + emits[:, root], count)]
            least[root] = min(time[root] + rest for time, rest in zip(times, after, strict=True))
        seconds, start = seconds + least[0], start + count
    return sum(roots) / seconds
