"""The policy `survival` verifies the nodes of all rows that are worth the target's time."""

from collections.abc import Sequence

import numpy as np
from typing_extensions import override

from specdec.engine.adaptive import Draft, Outcome
from specdec.tuning.costs import Costs, Kind
from specdec.tuning.estimators import Estimator
from specdec.tuning.policy import BEGIN, BLOCK, MEMORY, Bandit

FIRST = 64  # rows, in BEGIN rounds at least, that are drafted as deep as can be and verified whole, to learn from
WHOLE = 2 * BLOCK  # one of so many later drafts is verified whole
SELDOM = BLOCK // 2  # one of so many drafts updates trees of fewer levels, and is looked at if cuts do not pay lately
Cut = tuple[np.ndarray | None, float]  # nodes to keep, None for all; and a row's expected tokens per second with these


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

    def _speed(self, rows: int, seconds: np.ndarray) -> np.ndarray:
        tokens = 1 + (self.tokens - 1) * (self.given / self.hoped)
        own = np.stack([self._by_nodes(rows, levels) for levels in range(len(self.kinds))])
        whole = own[range(len(self.kinds)), [kind.nodes for kind in self.kinds]]
        return np.fmax.reduce(tokens / (seconds[:, None] + self.speed * (own - whole[:, None])), 1)

    def _begins(self) -> bool:
        return self.seen < FIRST or self.drafts < BEGIN

    @override
    def looks(self) -> bool:
        self.unseen += 1
        if not (self._pays() or self._begins()) and self.unseen < SELDOM:
            return False
        self.unseen = 0
        return True

    def _pays(self) -> bool:
        """Return whether cuts saved more lately than it takes to look at a draft."""
        kind = self.kinds[-1]
        return self.saved > self.costs.seconds(kind._replace(cut=True)) - self.costs.seconds(kind)

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
