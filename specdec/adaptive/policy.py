"""What an adaptive policy is asked, and what it is told. All of it is numpy on the host.

B rows of a batch   N nodes of their trees, root included   D levels of the largest tree
"""

from dataclasses import dataclass

import numpy as np

from specdec.adaptive.curve import Curve

PLAIN = 16  # one of so many rounds that are timed is plain, whatever pays: else nobody knows what plain rounds take
PATIENCE = 8  # plain rounds after which drafting begins again, if it would have been faster in all of them


@dataclass
class Draft:
    """The trees of a round before the target has seen them."""

    levels: int  # that were drafted
    edges: np.ndarray  # [B,N] log-probability of each node given its parent, as the drafter tells it; 0 at the root
    parents: np.ndarray  # [B,N] the root its own
    depth: np.ndarray  # [B,N] root 0
    ancestors: np.ndarray  # [B,N,N] bool: ancestors[b,i,j] = j lies on the path from the root to i, i included
    live: np.ndarray  # [B] bool: which rows still decode
    # Children were drawn from the drafter's distribution, and the rule counts on that. `edges` then tell of a node's
    # place before its token was drawn, and only whole levels may be cut.
    drawn: bool = False
    confidence: np.ndarray | None = None  # [B,D] logits of a confidence head for the levels of a chain

    @property
    def nodes(self) -> int:
        return self.edges.shape[1]


@dataclass
class Outcome:
    """What a round did to the rows that decoded in it, R of them."""

    levels: int  # drafted; 0 for a plain round
    nodes: int  # verified for each row, the root included
    accepted: list[int]  # [R]
    ended: list[bool]  # [R] the accepted path ends in a leaf: nothing is known of the token behind it
    draft: Draft | None = None  # as it was verified; None for policies that do not cut
    path: np.ndarray | None = None  # [B,P] accepted nodes of that draft, root first; entries behind the accepted are 0


class Policy:
    """Chooses the trees of rounds. A policy belongs to one engine, and is told of its rounds in order.

    The two choices depend on the past, on the number of rows and on the draft alone. What the target says of a node is
    not known when they are made, and must not be: then every rule emits what it would emit with that tree.
    """

    name = "policy"
    cuts = False  # asks for drafts, and may leave nodes out

    def plan(self, rows: int) -> int:
        """How many levels to draft for so many rows, 0 to D; 0 is a plain round."""
        raise NotImplementedError

    def keep(self, draft: Draft) -> np.ndarray | None:
        """The nodes to verify, [B,n] ascending and root first, closed under parents; None for all of them."""
        return None

    def learn(self, outcome: Outcome) -> None:
        """Is told of every round that was read."""

    def took(self, seconds: float) -> None:
        """Is told how long the round that it was told of last took, from the end of the one before. A server tells."""


class Costed(Policy):
    """A policy that goes by what rounds cost."""

    curve: Curve | None
    rounds = 0  # that were planned
    now: int | None = None  # levels that rounds draft lately
    waiting = 0  # plain rounds since a draft would have been faster
    last: tuple[int, int, int] | None = None  # rows, levels and nodes of the last round, if its time tells something
    drafted = 0  # levels of that round
    timed = False  # a server tells how long rounds take, and the choice goes by that

    def plan(self, rows: int) -> int:
        self.rounds += 1
        levels = self._choose(rows)
        return 0 if self.timed and self.rounds % PLAIN == PLAIN // 2 else levels

    def _choose(self, rows: int) -> int:
        """How many levels to draft for so many rows."""
        raise NotImplementedError

    def _settle(self, levels: int) -> int:
        """Go on with so many levels. After plain rounds a drafter has much to absorb: so drafting begins again when it
        would have been faster for a while."""
        self.waiting = self.waiting + 1 if levels and self.now == 0 else 0
        if not self.waiting or self.waiting > PATIENCE:
            self.now = levels
        return self.now

    def learn(self, outcome: Outcome) -> None:
        absorbed, self.drafted = outcome.levels and not self.drafted, outcome.levels  # what plain rounds left
        self.last = None if absorbed else (len(outcome.accepted), outcome.levels, outcome.nodes)

    def took(self, seconds: float) -> None:
        last, self.last = self.last, None
        if self.curve is None:
            return
        self.timed = True
        if last is not None:
            self.curve.took(*last, seconds)


class Fixed(Policy):
    """As many levels at any load."""

    name = "fixed"

    def __init__(self, levels: int):
        """levels: 0 decodes plainly."""
        self.levels = levels

    def plan(self, rows: int) -> int:
        return self.levels
