"""The policy `survival`: of all nodes of all rows those that are worth the target's time."""

from collections.abc import Sequence

import numpy as np

from specdec.adaptive.costed import Costed
from specdec.adaptive.curve import Curve
from specdec.adaptive.estimators import Estimator
from specdec.adaptive.policy import Draft, Outcome
from specdec.adaptive.rates import BEGIN, MEMORY

FIRST = 64  # rows, in BEGIN rounds at least, that are drafted as deep as can be and verified whole, to learn from
WHOLE = 32  # behind these, one of so many drafts is verified whole
ALL_DEPTHS = 8  # one of so many drafts tells of trees of fewer levels too
# Where so many drafts in a row were best verified whole, only one of so many is looked at: to look takes a tenth of a
# small target's round.
SURE, SELDOM_LOOKS = 8, 8


class Survival(Costed):
    """Every node of every row's tree is scored by its survival, the product of the estimated acceptances on its path,
    and the best are verified: as many as give the most expected tokens a second by the measured costs (top S over the
    batch: vLLM's adaptive verification and TETRIS, for chains; here for trees). How deep to draft is told by what the
    best nodes of such trees were expected to give lately, at the best width.

    Rows are verified together, padded to the widest. So every row may as well have as many nodes as that one, and what
    is chosen is the width. No node survives more often than its parent, so the best of a row are closed under parents.
    """

    name = "survival"

    def __init__(self, curve: Curve, sizes: Sequence[int], prior: Sequence[float], estimator: Estimator):
        """sizes [D+1]: nodes of the trees of 0, 1, ... D levels. prior [D]: how often a level is accepted where the one
        before was, to begin with."""
        super().__init__()
        self.curve, self.sizes, self.estimator = curve, list(sizes), estimator
        self.drafts = self.seen = 0  # that were looked at; seen: rows with such a draft
        self.whole = self.unseen = 0  # drafts in a row that were best verified whole, and that were not looked at
        # [D+1,N+1] tokens that a row is expected to emit by levels and by nodes, the best ones; nan for other numbers.
        reach, nodes = np.concatenate([[1.0], np.cumprod(prior)]), np.arange(max(sizes) + 1)
        self.tokens = np.stack([reach.cumsum()[np.clip(nodes - 1, 0, levels)] for levels in range(len(sizes))])
        for levels, size in enumerate(sizes):
            self.tokens[levels, [0, *range(size + 1, len(nodes))]] = np.nan
        # Drafted tokens that verified nodes were expected to give lately, and that they gave: the estimator learns
        # later than averages of what it has said, so these are corrected by the quotient.
        self.hope = 0.0
        self.hoped = self.given = float(reach[1:].sum())

    def _deepest(self, rows: int) -> int:
        return len(self.sizes) - 1

    def _best(self, rows: int) -> int:
        rest, verify = self.curve.at(rows)
        tokens = 1 + (self.tokens - 1) * (self.given / self.hoped)
        speed = tokens / (rest[: len(self.sizes), None] + verify[None, : self.tokens.shape[1]])
        return self._fastest(rows, np.fmax.reduce(speed, 1))

    def _begins(self) -> bool:
        return self.seen < FIRST or self.drafts < BEGIN

    def looks(self) -> bool:
        self.unseen += 1
        if self.whole >= SURE and self.unseen < SELDOM_LOOKS:
            return False
        self.unseen = 0
        return True

    def keep(self, draft: Draft) -> np.ndarray | None:
        whole, rows = self._begins(), int(draft.live.sum())
        self.drafts, self.seen = self.drafts + 1, self.seen + rows
        survival = self.estimator.survival(draft)
        rest, verify = self.curve.at(rows)
        order = np.argsort(-survival, axis=1, kind="stable")  # a parent stands before its children, also among equals
        tokens = np.take_along_axis(survival, order, 1)[draft.live].mean(0).cumsum()  # the root's is 1
        self._expect(draft, survival, tokens, whole)
        if draft.drawn:
            kept = self._levels(draft, survival, rest[draft.levels], verify)
        else:
            width = 1 + int((tokens / (rest[draft.levels] + verify[1 : draft.nodes + 1])).argmax())
            kept = None if width == draft.nodes else np.sort(order[:, :width], 1)
        self.whole = self.whole + 1 if kept is None else 0
        if whole or self.drafts % WHOLE == 0:
            kept = None
        verified = survival if kept is None else np.take_along_axis(survival, kept, 1)
        self.hope = float(verified[draft.live].sum(1).mean()) - 1
        return kept

    def _expect(self, draft: Draft, survival: np.ndarray, tokens: np.ndarray, every: bool) -> None:
        """Average what the best nodes of trees of this depth are expected to give. every: of all smaller depths too, as
        is done now and then."""
        share = 1 - MEMORY ** int(draft.live.sum())
        for levels in range(1, draft.levels):
            if not every and self.drafts % ALL_DEPTHS:
                break
            shallow = np.sort(np.where(draft.depth <= levels, survival, 0.0)[draft.live], 1)[:, ::-1].mean(0).cumsum()
            size = min(self.sizes[levels], draft.nodes)
            self.tokens[levels, 1 : size + 1] += share * (shallow[:size] - self.tokens[levels, 1 : size + 1])
        self.tokens[draft.levels, 1 : draft.nodes + 1] += share * (
            tokens - self.tokens[draft.levels, 1 : draft.nodes + 1]
        )

    def _levels(self, draft: Draft, survival: np.ndarray, rest: float, verify: np.ndarray) -> np.ndarray | None:
        """Whole levels, one after the other, as long as the next one pays. Whether it does is told by what is known
        before its tokens were drawn. To look at a later level and then leave this one out would show in the text: a
        drawn token would be kept or dropped by what it led to."""
        shape, live = draft.depth[0], survival[draft.live].mean(0)
        tokens, kept = 1.0, 1
        for level in range(1, draft.levels + 1):
            more = int((shape <= level).sum())
            with_it = tokens + live[shape == level].sum()
            if with_it / (rest + verify[more]) <= tokens / (rest + verify[kept]):
                break
            tokens, kept = with_it, more
        return None if kept == draft.nodes else np.broadcast_to(np.arange(kept), (len(survival), kept))

    def learn(self, outcome: Outcome) -> None:
        super().learn(outcome)
        if outcome.levels:
            self.estimator.learn(outcome)
            if outcome.draft is not None:
                share = 1 - MEMORY ** len(outcome.accepted)
                self.hoped += share * (self.hope - self.hoped)
                self.given += share * (sum(outcome.accepted) / len(outcome.accepted) - self.given)
