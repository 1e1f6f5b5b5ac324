"""The policy `survival`: of all nodes of all rows those that are worth the target's time."""

from collections.abc import Sequence

import numpy as np

from specdec.adaptive.curve import Curve
from specdec.adaptive.estimators import Estimator
from specdec.adaptive.policy import Draft, Outcome
from specdec.adaptive.rates import MEMORY, RETURN, WEIGHT, Ema, fastest


class Survival(Ema):
    """The depth is chosen as `ema` does. Then every node of every row's tree is scored by its survival, the product of
    the estimated acceptances on its path, and the best are verified: as many as give the most expected tokens a second
    by the measured costs (top S over the batch: vLLM's adaptive verification and TETRIS, for chains; here for trees).

    Rows are verified together, padded to the widest. So every row may as well have as many nodes as that one, and what
    is chosen is the width. No node survives more often than its parent, so the best of a row are closed under parents.
    """

    name = "survival"
    cuts = True

    def __init__(self, curve: Curve, sizes: Sequence[int], prior: Sequence[float], estimator: Estimator):
        super().__init__(curve, sizes, prior)
        self.estimator = estimator
        # Lately, by levels: rows that were observed, the tokens that they emitted, and the nodes verified for them.
        self.seen, self.emitted, self.verified = (np.zeros(len(sizes)) for _ in range(3))

    def plan(self, rows: int) -> int:
        rest, verify = self.curve.at(rows)
        whole = np.concatenate([[1.0], 1 + self.rates.reach().cumsum()])[: len(self.sizes)]
        weight = self.seen + WEIGHT  # what was not observed counts as a whole tree by the running averages
        tokens = (self.emitted + WEIGHT * whole) / weight
        nodes = (self.verified + WEIGHT * self.sizes) / weight
        seconds = rest[: len(nodes)] + np.interp(nodes, np.arange(len(verify)), verify)
        self.now = fastest(tokens, seconds, self.now)
        return self.now

    def keep(self, draft: Draft) -> np.ndarray | None:
        survival = self.estimator.survival(draft)
        rest, verify = self.curve.at(int(draft.live.sum()))
        if draft.drawn:
            return self._levels(draft, survival, rest[draft.levels], verify)
        order = np.argsort(-survival, axis=1, kind="stable")  # a parent stands before its children, also among equals
        best = np.take_along_axis(survival, order, 1)[draft.live]  # the root's is 1
        tokens = best.sum(0).cumsum()
        width = 1 + fastest_width(tokens, rest[draft.levels] + verify[1 : draft.nodes + 1])
        return None if width == draft.nodes else np.sort(order[:, :width], 1)

    def _levels(self, draft: Draft, survival: np.ndarray, rest: float, verify: np.ndarray) -> np.ndarray | None:
        """Whole levels, one after the other, as long as the next one pays. Whether it does is told by what is known
        before its tokens were drawn. To look at a later level and then leave this one out would show in the text: a
        drawn token would be kept or dropped by what it led to."""
        shape, live = draft.depth[0], survival[draft.live]
        tokens = live[:, shape == 0].sum()
        kept = 1
        for level in range(1, draft.levels + 1):
            more = int((shape <= level).sum())
            with_it = tokens + live[:, shape == level].sum()
            if with_it / (rest + verify[more]) <= tokens / (rest + verify[kept]):
                break
            tokens, kept = with_it, more
        return None if kept == draft.nodes else np.broadcast_to(np.arange(kept), (len(survival), kept))

    def learn(self, outcome: Outcome) -> None:
        super().learn(outcome)
        rows = len(outcome.accepted)
        for kept in (self.seen, self.emitted, self.verified):
            played = kept[outcome.levels]
            kept *= RETURN
            kept[outcome.levels] = MEMORY * played
        self.seen[outcome.levels] += rows
        self.emitted[outcome.levels] += rows + sum(outcome.accepted)
        self.verified[outcome.levels] += rows * outcome.nodes
        if outcome.levels:
            self.estimator.learn(outcome)


def fastest_width(tokens: np.ndarray, seconds: np.ndarray) -> int:
    return int((tokens / seconds).argmax())
