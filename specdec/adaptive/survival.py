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
# What it takes to look at a draft and to learn from it, on any processor about. Where cuts save less than that lately,
# only one of so many drafts is looked at.
LOOK, SELDOM_LOOKS = 3e-4, 8
LATELY = 1 / 16  # weight of a draft in what cuts save
Cut = tuple[np.ndarray | None, float]  # nodes to keep, None for all; and a row's expected tokens a second with these


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
        self.unseen = 0  # drafts in a row that were not looked at
        self.saved, self.pays = 1.0, True  # by cuts lately, share of a round; whether to look at drafts pays
        # [D+1,N+1] tokens that a row is expected to emit by levels and by nodes, the best ones; nan for other numbers.
        reach, nodes = np.concatenate([[1.0], np.cumprod(prior)]), np.arange(max(sizes) + 1)
        self.tokens = np.stack([reach.cumsum()[np.clip(nodes - 1, 0, levels)] for levels in range(len(sizes))])
        for levels, size in enumerate(sizes):
            self.tokens[levels, [0, *range(size + 1, len(nodes))]] = np.nan
        # Drafted tokens that verified nodes were expected to give lately, and that they gave: the estimator learns
        # later than averages of what it has said, so these are corrected by the quotient.
        self.hope = 0.0
        self.hoped = self.given = float(reach[1:].sum())

    def _best(self, rows: int) -> int:
        rest, verify = self.curve.at(rows)
        tokens = 1 + (self.tokens - 1) * (self.given / self.hoped)
        speed = tokens / (rest[: len(self.sizes), None] + verify[None, : self.tokens.shape[1]])
        return self._fastest(rows, np.fmax.reduce(speed, 1))

    def _begins(self) -> bool:
        return self.seen < FIRST or self.drafts < BEGIN

    def looks(self) -> bool:
        self.unseen += 1
        if not (self.pays or self._begins()) and self.unseen < SELDOM_LOOKS:
            return False
        self.unseen = 0
        return True

    def keep(self, draft: Draft) -> np.ndarray | None:
        whole, rows = self._begins(), int(draft.live.sum())
        self.drafts, self.seen = self.drafts + 1, self.seen + rows
        survival = self.estimator.survival(draft)
        rest, verify = self.curve.at(rows)
        tokens = _tokens_by_width(survival[draft.live])
        self._expect(draft, survival, tokens, whole)
        seconds = rest[draft.levels] + verify
        kept, speed = (self._levels if draft.drawn else self._width)(draft, survival, tokens, seconds)
        self.saved += LATELY * (1 - tokens[-1] / seconds[draft.nodes] / speed - self.saved)
        self.pays = self.saved * seconds[draft.nodes] > LOOK
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
            shallow = _tokens_by_width(np.where(draft.depth <= levels, survival, 0.0)[draft.live])
            size = min(self.sizes[levels], draft.nodes)
            self.tokens[levels, 1 : size + 1] += share * (shallow[:size] - self.tokens[levels, 1 : size + 1])
        self.tokens[draft.levels, 1 : draft.nodes + 1] += share * (
            tokens - self.tokens[draft.levels, 1 : draft.nodes + 1]
        )

    @staticmethod
    def _width(draft: Draft, survival: np.ndarray, tokens: np.ndarray, seconds: np.ndarray) -> Cut:
        """The best nodes of every row, as many as give the most tokens a second. tokens [N], seconds [N+1]: by how many
        are kept."""
        speed = tokens / seconds[1 : draft.nodes + 1]
        width = 1 + int(speed.argmax())
        if width == draft.nodes:
            return None, speed[-1]
        order = np.argsort(-survival, axis=1, kind="stable")  # a parent stands before its children, also among equals
        return np.sort(order[:, :width], 1), speed[width - 1]

    @staticmethod
    def _levels(draft: Draft, survival: np.ndarray, tokens: np.ndarray, seconds: np.ndarray) -> Cut:
        """Whole levels, one after the other, as long as the next one pays. Whether it does is told by what is known
        before its tokens were drawn. To look at a later level and then leave this one out would show in the text: a
        drawn token would be kept or dropped by what it led to."""
        shape, live = draft.depth[0], survival[draft.live].mean(0)
        found, kept = 1.0, 1
        for level in range(1, draft.levels + 1):
            more = int((shape <= level).sum())
            with_it = found + live[shape == level].sum()
            if with_it / seconds[more] <= found / seconds[kept]:
                break
            found, kept = with_it, more
        whole = kept == draft.nodes
        return None if whole else np.broadcast_to(np.arange(kept), (len(survival), kept)), found / seconds[kept]

    def learn(self, outcome: Outcome) -> None:
        super().learn(outcome)
        if outcome.levels:
            self.estimator.learn(outcome)
            if outcome.draft is not None:
                share = 1 - MEMORY ** len(outcome.accepted)
                self.hoped += share * (self.hope - self.hoped)
                self.given += share * (sum(outcome.accepted) / len(outcome.accepted) - self.given)


def _tokens_by_width(survival: np.ndarray) -> np.ndarray:
    """[N] tokens that a row is expected to emit, in the mean of the rows [R,N], with its best 1, 2, ... N nodes."""
    return np.sort(survival, 1)[:, ::-1].mean(0).cumsum()
