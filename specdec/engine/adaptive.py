"""Interface of adaptive policies, which choose the tree of each round. All of it is numpy on the host.

B rows of a batch   N nodes of their trees, root included   D levels of the largest tree
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specdec.schema import shown


@dataclass
class Draft:
    """The trees of a round before the target has seen them."""

    levels: int  # drafted
    edges: np.ndarray  # [B,N] log-probability of each node given its parent, under the drafter; 0 at the root
    parents: np.ndarray  # [B,N] the root its own
    depth: np.ndarray  # [B,N] root 0
    ancestors: np.ndarray  # [B,N,N] bool: ancestors[b,i,j] = j lies on the path from the root to i, i included
    live: np.ndarray  # [B] bool: which rows decode, with all levels
    # Children were drawn from the drafter's distribution, and the verifier needs that. `edges` then hold estimates of a
    # node's place from before its token was drawn, and only whole levels may be cut.
    drawn: bool = False
    confidence: np.ndarray | None = None  # [B,D] logits of a confidence head for the levels of a chain

    @property
    def nodes(self) -> int:
        """Number of nodes of the trees, N."""
        return self.edges.shape[1]


@dataclass
class Outcome:
    """Result of a round for the R rows whose requests allow all its levels.

    Levels for which the drafter had nothing to propose for a row count as not accepted.
    """

    levels: int  # drafted; 0 for a plain round
    nodes: int  # verified for each row, the root included
    accepted: list[int]  # [R]
    ended: list[bool]  # [R] the accepted path ends in a leaf, so the draft says nothing about the token after it
    draft: Draft | None = None  # as it was verified; None if the policy did not look at it
    path: np.ndarray | None = None  # [B,P] accepted nodes of that draft, root first; padded with 0
    others: Sequence[int] = ()  # accepted in further rows, for which fewer levels counted


def flaw_of(selected: np.ndarray, draft: Draft) -> str:
    """Return why these nodes [B,n] are not what `Policy.keep` must return; empty if they are."""
    if not isinstance(selected, np.ndarray) or selected.dtype.kind not in "iu" or selected.ndim != 2:
        return f"they must be an array [B,n] of whole numbers, got {shown(selected)}"
    rows, count = len(draft.edges), selected.shape[1]
    if len(selected) != rows or count < 1 or (selected[:, 0] != 0).any():
        return f"each of the {rows} rows must begin with the root, which is 0"
    if (np.diff(selected, axis=1) <= 0).any() or selected.max() >= draft.nodes:
        return f"nodes must ascend, and the last of a tree is {draft.nodes - 1}"
    parents = np.take_along_axis(draft.parents, selected, 1)
    closed = (parents[..., None] == selected[:, None]).any(-1).all()
    return "" if closed else "the parent of each node must be among them"


class Policy:
    """Chooses the trees of rounds. A policy belongs to one engine, which reports the rounds in order.

    The two choices depend on the past, on the number of rows and on the draft alone. They must not depend on the
    target's logits for the draft: then every verifier emits what it would emit with that tree.
    """

    name = "policy"

    @property
    def cuts(self) -> bool:
        """Whether nodes of a draft may be left out, which the host must see for that: such rounds are eager."""
        return type(self).keep is not Policy.keep

    def plan(self, rows: int) -> int:
        """Return how many levels to draft for so many rows, 0 to D; 0 is a plain round."""
        raise NotImplementedError

    def looks(self) -> bool:
        """Return whether to ask `keep` about the draft that was planned last. If not, all of it is verified."""
        return False

    def keep(self, draft: Draft) -> np.ndarray | None:
        """Return the nodes to verify, [B,n] ascending and root first, closed under parents; None for all of them."""
        return None

    def learn(self, outcome: Outcome) -> None:
        """Update the estimates with a round that was read."""

    def took(self, seconds: float) -> None:
        """Report how long the last learnt round took, from the end of the one before. Only a server calls this."""

    def changed(self, rows: int, levels: int) -> None:
        """Report that rounds of this size have been compiled, so their time changes from now on."""

    def joined(self, rows: int, seconds: float | None) -> None:
        """Report that sequences have joined the batch.

        seconds: the time in which the drafter absorbed their prompts; None if the drafter has not absorbed them yet.
        """


class Fixed(Policy):
    """The same number of levels at any load."""

    name = "fixed"

    def __init__(self, levels: int):
        """Always draft this many levels; 0 decodes plainly."""
        self.levels = levels

    def plan(self, rows: int) -> int:
        """Return the same number of levels for any number of rows."""
        return self.levels
