"""Estimates of how likely a drafted node is accepted if its parent is, made before the target has run.

What they learn from is censored: of a round only the children of accepted nodes are known to be right or wrong.
"""

from typing import Any

import numpy as np
from typing_extensions import override

from specdec.engine.adaptive import Draft, Outcome

SOON, EVERY = 32, 256  # observations before the first fit, which follow each other the more seldom, and between two
WINDOW = 4000  # observations that a fit uses, the latest ones
RIDGE = 4.0  # observations that the wish for slope 1 and intercepts 0 counts
ROUNDS = 4  # of Newton's method
LEAST, MOST = 1e-4, 1 - 1e-4


class Estimator:
    """A node's probability of being accepted, given that its parent is: by default the drafter's own probability."""

    def edges(self, draft: Draft) -> np.ndarray:
        """Return [B,N] the probabilities given the parent; void at the root."""
        return np.exp(draft.edges)

    def learn(self, outcome: Outcome) -> None:
        """Update the estimates with a round that was cut by them."""

    def survival(self, draft: Draft) -> np.ndarray:
        """Return [B,N] the probability that all nodes from the root to this one are accepted. It falls along paths."""
        logs = np.log(np.clip(self.edges(draft), LEAST, MOST))
        logs[:, 0] = 0.0
        return np.exp((draft.ancestors * logs[:, None]).sum(-1))


class Calibrated(Estimator):
    """A logistic function of the log-odds of the drafter's probability: one slope for all, an intercept for each level.

    It is fitted online by Newton's method with a ridge (as vLLM's adaptive verification).
    """

    def __init__(self, levels: int):
        """Begin with the drafter's own probabilities."""
        self.weights = np.zeros(levels + 1)  # the intercepts, then the slope
        self.weights[-1] = 1.0
        self.start = self.weights.copy()
        self.features = np.empty((0, levels + 1))
        self.labels = np.empty(0)
        self.seen: list[tuple[np.ndarray, np.ndarray]] = []  # features and labels since the last fit
        self.since = 0  # observations among the seen

    def feature(self, draft: Draft) -> np.ndarray:
        """Return [B,N] the feature of each node, in addition to its level."""
        p = np.clip(np.exp(draft.edges), LEAST, MOST)
        return np.log(p / (1 - p))

    @override
    def edges(self, draft: Draft) -> np.ndarray:
        level = np.maximum(draft.depth - 1, 0)
        return _sigmoid(self.weights[level] + self.weights[-1] * self.feature(draft))

    @override
    def learn(self, outcome: Outcome) -> None:
        if outcome.draft is None:
            return
        rows, nodes, labels = observed(outcome)
        features = np.zeros((len(rows), len(self.weights)))
        features[np.arange(len(rows)), outcome.draft.depth[rows, nodes] - 1] = 1
        features[:, -1] = self.feature(outcome.draft)[rows, nodes]
        self.seen.append((features, labels))
        self.since += len(rows)
        if self.since >= min(max(SOON, len(self.labels) // 2), EVERY):
            self.fit()

    def fit(self) -> None:
        """Fit the weights to the last observations."""
        features, labels = zip(*self.seen, strict=True)
        self.features = np.concatenate([self.features, *features])[-WINDOW:]
        self.labels = np.concatenate([self.labels, *labels])[-WINDOW:]
        self.seen, self.since = [], 0
        x, w, ridge = self.features, self.weights, RIDGE * np.eye(len(self.weights))
        for _ in range(ROUNDS):
            p = _sigmoid(x @ w)
            slope = x.T @ (p - self.labels) + ridge @ (w - self.start)
            w = w - np.linalg.solve((x * (p * (1 - p))[:, None]).T @ x + ridge, slope)
        if np.isfinite(w).all() and w[-1] > 0:
            self.weights = w


class Margin(Calibrated):
    """The same for the margin: the difference of a node's log-probability to that of its best sibling.

    A node without siblings in the tree has its log-odds as margin.
    """

    @override
    def feature(self, draft: Draft) -> np.ndarray:
        odds = super().feature(draft)
        siblings = draft.parents[:, :, None] == draft.parents[:, None]
        siblings &= ~np.eye(draft.nodes, dtype=bool)
        siblings[:, :, 0] = False  # the root is its own parent, and no node's sibling
        best = np.where(siblings, draft.edges[:, None], -np.inf).max(-1)
        return np.where(np.isfinite(best), draft.edges - best, odds)


class Confident(Estimator):
    """What a confidence head says, of drafters that have one and draft chains; else the drafter's own probability."""

    @override
    def edges(self, draft: Draft) -> np.ndarray:
        if draft.confidence is None:
            return super().edges(draft)
        return np.concatenate([np.ones((len(draft.edges), 1)), _sigmoid(draft.confidence)], 1)[:, : draft.nodes]


ESTIMATORS: dict[str, type[Estimator]] = {
    "told": Estimator,
    "calibrated": Calibrated,
    "margin": Margin,
    "confidence": Confident,
}


def make_estimator(name: str, levels: int) -> Estimator:
    """Return the estimator of this name for trees of so many levels. ValueError for a name that is none."""
    if name not in ESTIMATORS:
        raise ValueError(f"there is no estimator {name!r}; there are {', '.join(ESTIMATORS)}")
    kind = ESTIMATORS[name]
    return kind(levels) if issubclass(kind, Calibrated) else kind()


def observed(outcome: Outcome) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rows, nodes and labels of a round: of the children of accepted nodes, whether each was right."""
    draft: Any = outcome.draft
    path: Any = outcome.path
    on_path = np.zeros(draft.edges.shape, dtype=bool)
    np.put_along_axis(on_path, path, True, 1)  # the root too, as paths are padded with 0
    known = np.take_along_axis(on_path, draft.parents, 1) & draft.live[:, None]
    known[:, 0] = False
    rows, nodes = known.nonzero()
    return rows, nodes, on_path[rows, nodes].astype(float)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-np.clip(x, -30, 30)))
