"""Between the engine and an adaptive policy: trees as the policy sees them, and what plain rounds leave to the drafter.

To choose nodes of a tree that has been drafted, the host must see it. On a GPU that waits for the draft.
"""

import time
from collections import abc
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from specdec.contracts import Drafter, DraftState
from specdec.engine.adaptive import Draft, Outcome, Policy
from specdec.engine.held import Held
from specdec.engine.sequence import Sequence
from specdec.structs import DraftTree, Survivors, Verdict

NEVER = -30.0  # what policies are told in the place of the log-probability of nothing, by which none can reckon


@dataclass
class Played:
    """A round as its policy is told of it, when it is read."""

    levels: int
    nodes: int = 1
    rows: abc.Sequence[int] = ()  # that are learnt from
    draft: Draft | None = None
    parents: Tensor | None = None  # [B,N]
    path: Tensor | None = None  # [B,P]

    def outcome(self, counts: list[int]) -> Outcome:
        """counts [B]: tokens that each row emitted, before any cut."""
        accepted = [counts[row] - 1 for row in self.rows]
        if self.parents is None:
            return Outcome(self.levels, 1, accepted, [True] * len(accepted))
        path, parents = self.path.tolist(), self.parents.tolist()  # lists, as numpy is the slower for so few numbers
        leaves = [path[row][counts[row] - 1] not in parents[row][1:] for row in self.rows]
        looked = None if self.draft is None else np.asarray(path)
        return Outcome(self.levels, self.nodes, accepted, leaves, self.draft, looked)


@dataclass
class Watch:
    """Stands in for a `Guide` in rounds that are recorded: it keeps what the guide is told after each replay."""

    holds: bool
    feats: Tensor | None = None  # of a plain round, as for `Guide.hold`
    tokens: Tensor | None = None
    n: Tensor | None = None
    parents: Tensor | None = None  # of one that drafts
    path: Tensor | None = None

    def cut(self, tree: DraftTree, state: DraftState) -> DraftTree:
        return tree

    def verified(self, tree: DraftTree, verdict: Verdict) -> None:
        self.parents, self.path = tree.parents, verdict.path

    def hold(self, feats: Tensor | None, tokens: Tensor, n: Tensor, state: DraftState) -> DraftState:
        self.feats, self.tokens, self.n = feats, tokens, n
        return state


class Guide:
    """Asks a policy of the rounds of one batch."""

    def __init__(self, policy: Policy, drafter: Drafter):
        self.policy, self.drafter = policy, drafter
        # All that such a drafter keeps of positions is a cache. What others do with one costs little.
        self.holds = drafter.capturable and drafter.cache is not None
        self.held: Held | None = None
        # Of rows that were prefilled, and not yet counted among the batch's.
        self.joining: tuple[Tensor | None, Tensor, Tensor] | None = None
        self.played: Played | None = None  # the round that was asked for last
        self.plain = False  # rounds are plain lately
        self.like: DraftState | None = None  # a state of the drafter's without rows, for its shape

    def begin(self, sequences: abc.Sequence[Sequence]) -> int:
        """How many levels to draft in the next round of these rows."""
        live = [i for i, sequence in enumerate(sequences) if sequence.finish is None]
        levels = self.policy.plan(len(live))
        if any(sequences[i].steps is not None for i in live):
            asked = {i: levels if sequences[i].steps is None else min(sequences[i].steps, levels) for i in live}
            levels = max(asked.values())
            # A row that lets fewer levels count tells nothing of those behind them.
            live = [i for i in live if asked[i] == levels]
        self.played, self.plain = Played(levels, rows=live), levels == 0
        return levels

    def cut(self, tree: DraftTree, state: DraftState) -> DraftTree | None:
        """The part of a round's tree that is verified; None for the root alone. state: what the tree grew from."""
        if tree.logq is not None and self.policy.looks():
            draft = self._draft(tree, state)
            kept = self.policy.keep(draft)
            if kept is not None and kept.shape[1] == 1:
                return None
            self.played.draft = draft if kept is None else kept_of(draft, kept)
            if kept is not None:
                tree = trimmed(tree, torch.from_numpy(np.ascontiguousarray(kept)).to(tree.tokens.device))
        self.played.nodes = tree.tokens.shape[1]
        return tree

    def verified(self, tree: DraftTree, verdict: Verdict) -> None:
        """Keep what the policy is told of the round."""
        self.played.parents, self.played.path = tree.parents, verdict.path

    def watched(self, watch: Watch, nodes: int, state: DraftState) -> None:
        """Take over what a recorded round, of trees of so many nodes, has left."""
        if watch.tokens is not None:
            self.hold(watch.feats, watch.tokens, watch.n, state)
        self.played.nodes, self.played.parents, self.played.path = nodes, watch.parents, watch.path

    def learn(self, played: Played, counts: list[int]) -> None:
        if played.rows:
            self.policy.learn(played.outcome(counts))

    def _draft(self, tree: DraftTree, state: DraftState) -> Draft:
        parents, drawn = tree.parents, tree.q is not None
        edges = tree.q.amax(-1).gather(1, parents).log() if drawn else tree.logq - tree.logq.gather(1, parents)
        edges = edges.nan_to_num(nan=NEVER, neginf=NEVER)  # below a node of probability 0 there is no difference
        sure = None
        if tree.topk is None and self.drafter.confident and tree.tokens.shape[1] == tree.steps + 1:
            sure = self.drafter.confidences(state, tree.tokens[:, 1:]).float().cpu().numpy()
        host = (x.cpu().numpy() for x in (edges.float(), parents, tree.depth, tree.ancestors))
        live = np.zeros(len(parents), dtype=bool)
        live[self.played.rows] = True
        return Draft(self.played.levels, *host, live, drawn, sure)

    # What plain rounds leave to the drafter

    def hold(self, feats: Tensor | None, tokens: Tensor, n: Tensor, state: DraftState) -> DraftState:
        """Keep what a plain round brought, instead of letting the drafter absorb it at once. Returns the state, which
        is that of before."""
        self.held = self.held or Held(len(tokens))
        self.held.put(feats, tokens, n)
        return state

    def absorb(self, state: DraftState, max_len: int) -> DraftState:
        """Let the drafter absorb what was held."""
        held, self.held = self.held, None
        return state if held is None else held.absorb(self.drafter, state, max_len)

    def admit(self, row: int, first: Tensor, feats: Tensor | None, tokens: Tensor, n: Tensor) -> DraftState:
        """As `Drafter.admit`. After a plain round prompts are held too, and the drafter has the rows' places only."""
        self.joining = None
        if not (self.plain and self.holds):
            begun = time.perf_counter()
            state = self.drafter.admit(row, first, feats, tokens, n)
            self.policy.joined(len(first), time.perf_counter() - begun)
            self.like = self.like or state.blank(0)
            return state
        self.policy.joined(len(first), None)
        self.joining = feats, tokens, n
        if self.drafter.keeps_first or self.like is None:
            return self.drafter.admit(row, first, None if feats is None else feats[:, :1], tokens[:, :1], n * 0)
        self.drafter.cache.admit(row, len(first), 0)
        return self.like.blank(len(first))

    def joined(self, first: int, rows: int) -> None:
        """The `rows` rows that were admitted last stand in the batch now, from `first` on."""
        joining, self.joining = self.joining, None
        if joining is not None:
            self.held = self.held or Held(first)
        if self.held is not None:
            self.held.join(first, rows, joining)

    def compact(self, kept: Survivors) -> None:
        """Go on with these rows only."""
        if self.held is not None:
            self.held.compact(kept)

    def forget(self) -> None:
        """No row goes on, so nobody will ask for what was held, nor for the last round."""
        self.held = self.played = None


def trimmed(tree: DraftTree, kept: Tensor) -> DraftTree:
    """The nodes kept [B,n] of a tree, ascending, root first and closed under parents."""
    n, whole = kept.shape[1], tree.tokens.shape[1]
    tokens, depth = tree.tokens.gather(1, kept), tree.depth.gather(1, kept)
    parents = torch.searchsorted(kept, tree.parents.gather(1, kept))
    rows = tree.ancestors.gather(1, kept[..., None].expand(-1, -1, whole))
    ancestors = rows.gather(2, kept[:, None].expand(-1, n, -1))
    logq = None if tree.logq is None else tree.logq.gather(1, kept)
    q = None if tree.q is None else tree.q.gather(1, kept[..., None].expand(-1, -1, tree.q.shape[-1]))
    return replace(tree, tokens=tokens, parents=parents, depth=depth, ancestors=ancestors,
                   steps=min(tree.steps, n - 1), logq=logq, q=q)  # fmt: skip


def kept_of(draft: Draft, kept: np.ndarray) -> Draft:
    """The draft of the nodes that are verified."""
    parents = np.take_along_axis(draft.parents, kept, 1)
    places = (kept[:, None] == parents[..., None]).argmax(-1)
    edges, depth = (np.take_along_axis(x, kept, 1) for x in (draft.edges, draft.depth))
    rows = np.take_along_axis(draft.ancestors, kept[..., None], 1)
    ancestors = np.take_along_axis(rows, kept[:, None], 2)
    return replace(draft, edges=edges, parents=places, depth=depth, ancestors=ancestors)
