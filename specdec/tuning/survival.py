"""The policy `survival` verifies the nodes of all rows that are worth the target's time.

An estimator says how likely a drafted node is accepted if its parent is, before the target has run. What it learns from
is censored: of a round only the children of accepted nodes are known to be right or wrong.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from typing_extensions import override

from specdec.engine.adaptive import Draft, Outcome
from specdec.tuning.costs import Costs, Kind
from specdec.tuning.policy import BEGIN, BLOCK, MEMORY, Bandit

FIRST = 64  # rows, in BEGIN rounds at least, that are drafted as deep as can be and verified whole, to learn from
WHOLE = 2 * BLOCK  # one of so many later drafts is verified whole
SELDOM = BLOCK // 2  # one of so many drafts updates trees of fewer levels, and is looked at if cuts do not pay lately
Cut = tuple[np.ndarray | None, float]  # nodes to keep, None for all; and a row's expected tokens per second with these
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


class Survival(Bandit):
    """Verifies the nodes with the best survival, as many as give the most expected tokens per second by the costs.

    The survival of a node is the product of the estimated acceptances on its path. The best of all rows are verified
    (top S over the batch: vLLM's adaptive verification and TETRIS, for chains; here for trees). How deep to draft
    follows from what the best nodes of such trees were expected to give lately, at the best width.

    Rows are verified together, padded to the widest. So every row may as well have as many nodes as that one, and
    what is chosen is the width. No node survives more often than its parent, so the best of a row are closed under
    parents.
    """

    name = "survival"

    def __init__(self, costs: Costs, kinds: Sequence[Kind], prior: Sequence[float], estimator: Estimator):
        """Begin as `Bandit` does, with this estimator of acceptances."""
        super().__init__(costs, kinds, prior)
        self.estimator = estimator
        self.drafts = self.seen = 0  # looked at, and the rows of these
        self.unseen = 0  # drafts in a row that were not looked at
        self.saved = 1.0  # seconds of a round by cuts lately, until then all of it
        # [D+1,N+1] tokens that a row is expected to emit by levels and by nodes, the best ones; nan for other numbers.
        reach, nodes = np.concatenate([[1.0], np.cumprod(prior)]), np.arange(kinds[-1].nodes + 1)
        self.tokens = np.stack([reach.cumsum()[np.clip(nodes - 1, 0, levels)] for levels in range(len(kinds))])
        for levels, kind in enumerate(kinds):
            self.tokens[levels, [0, *range(kind.nodes + 1, len(nodes))]] = np.nan
        # Drafted tokens that verified nodes were expected to give lately, and that they gave: the estimator learns
        # later than averages of its estimates, so these are corrected by the quotient.
        self.hope = 0.0
        self.hoped = self.given = float(reach[1:].sum())
        self._tables: dict[tuple[int, int], np.ndarray] = {}

    def _by_nodes(self, rows: int, levels: int) -> np.ndarray:
        """Return the measured seconds of rounds of so many levels by verified nodes [N+1], of which entry 0 is void."""
        if (rows, levels) not in self._tables:
            kind = self.kinds[levels]
            own = [float(self.costs.seconds(kind._replace(nodes=n), rows)) for n in range(self.kinds[-1].nodes + 1)]
            self._tables[rows, levels] = np.array(own)
        return self._tables[rows, levels]

    def _speed(self, rows: int, seconds: Sequence[float]) -> list[float]:
        tokens = 1 + (self.tokens - 1) * (self.given / self.hoped)
        own = np.stack([self._by_nodes(rows, levels) for levels in range(len(self.kinds))])
        whole = own[range(len(self.kinds)), [kind.nodes for kind in self.kinds]]
        return np.fmax.reduce(tokens / (np.array(seconds)[:, None] + self.speed * (own - whole[:, None])), 1).tolist()

    def _begins(self) -> bool:
        return self.seen < FIRST or self.drafts < BEGIN

    @override
    def looks(self) -> bool:
        kind = self.kinds[-1]
        price = self.costs.seconds(kind._replace(cut=True)) - self.costs.seconds(kind)  # of a look at a draft
        looks = self._begins() or self.saved > price or self.unseen + 1 >= SELDOM
        self.unseen = 0 if looks else self.unseen + 1
        return looks

    @override
    def keep(self, draft: Draft) -> np.ndarray | None:
        whole, rows = self._begins(), int(draft.live.sum())
        self.drafts, self.seen = self.drafts + 1, self.seen + rows
        survival = self.estimator.survival(draft)
        tokens = _tokens_by_width(survival[draft.live])
        self._expect(draft, survival, tokens, whole)
        own = self._by_nodes(rows, draft.levels)
        seconds = np.maximum(own + self._excess()[draft.levels], own / 10)
        nodes, speed = (self._levels if draft.drawn else self._width)(draft, survival, tokens, seconds)
        self.saved += (seconds[draft.nodes] - tokens[-1] / speed - self.saved) / BLOCK
        if whole or self.drafts % WHOLE == 0:
            nodes = None
        verified = survival if nodes is None else np.take_along_axis(survival, nodes, 1)
        self.hope = float(verified[draft.live].sum(1).mean()) - 1
        return nodes

    def _expect(self, draft: Draft, survival: np.ndarray, tokens: np.ndarray, every: bool) -> None:
        """Average what the best nodes of trees of this depth are expected to give. every: of all smaller depths too."""
        share = 1 - MEMORY ** int(draft.live.sum())
        for levels in range(1, draft.levels):
            if not every and self.drafts % SELDOM:
                break
            shallow = _tokens_by_width(np.where(draft.depth <= levels, survival, 0.0)[draft.live])
            size = min(self.kinds[levels].nodes, draft.nodes)
            self.tokens[levels, 1 : size + 1] += share * (shallow[:size] - self.tokens[levels, 1 : size + 1])
        self.tokens[draft.levels, 1 : draft.nodes + 1] += share * (
            tokens - self.tokens[draft.levels, 1 : draft.nodes + 1]
        )

    @staticmethod
    def _width(draft: Draft, survival: np.ndarray, tokens: np.ndarray, seconds: np.ndarray) -> Cut:
        """Return the best nodes of every row for the most tokens per second. tokens [N], seconds [N+1]: by nodes."""
        speed = tokens / seconds[1 : draft.nodes + 1]
        width = 1 + int(speed.argmax())
        if width == draft.nodes:
            return None, speed[-1]
        order = np.argsort(-survival, axis=1, kind="stable")  # a parent precedes its children, also among equals
        return np.sort(order[:, :width], 1), speed[width - 1]

    @staticmethod
    def _levels(draft: Draft, survival: np.ndarray, tokens: np.ndarray, seconds: np.ndarray) -> Cut:
        """Return whole levels, one after the other, as long as the next one pays.

        That decision must not depend on the level's drawn tokens. If a later level were looked at and then left out,
        the text would change: whether a drawn token is verified would depend on the tokens after it.
        """
        shape, live = draft.depth[0], survival[draft.live].mean(0)
        found, count = 1.0, 1
        for level in range(1, draft.levels + 1):
            more = int((shape <= level).sum())
            with_it = found + live[shape == level].sum()
            if with_it / seconds[more] <= found / seconds[count]:
                break
            found, count = with_it, more
        whole = count == draft.nodes
        return None if whole else np.broadcast_to(np.arange(count), (len(survival), count)), found / seconds[count]

    @override
    def learn(self, outcome: Outcome) -> None:
        super().learn(outcome)
        if outcome.levels:
            self.estimator.learn(outcome)
            if outcome.draft is not None:
                share = 1 - MEMORY ** len(outcome.accepted)
                self.hoped += share * (self.hope - self.hoped)
                self.given += share * (sum(outcome.accepted) / len(outcome.accepted) - self.given)


def _tokens_by_width(survival: np.ndarray) -> np.ndarray:
    """Return the tokens that a row is expected to emit [N], the mean of rows [R,N], with its best 1, ... N nodes."""
    return np.sort(survival, 1)[:, ::-1].mean(0).cumsum()
