"""Between the engine and an adaptive policy: trees as the policy sees them, and what plain rounds leave to the drafter.

To choose nodes of a tree that has been drafted, the host must see it. On a GPU that waits for the draft.
"""

from collections import abc
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.adaptive import Draft, Outcome, Policy
from specdec.contracts import Drafter, DraftState
from specdec.engine.sequence import Sequence
from specdec.types import DraftTree, Verdict

HOLD = 32  # positions that the drafter absorbs at once after plain rounds


@dataclass
class Played:
    """A round as its policy is told of it, when it is read."""

    levels: int
    nodes: int = 1
    live: np.ndarray | None = None  # [B] rows that are learnt from
    draft: Draft | None = None
    parents: Tensor | None = None  # [B,N]
    path: Tensor | None = None  # [B,P]

    def outcome(self, counts: list[int]) -> Outcome:
        """counts [B]: tokens that each row emitted, before any cut."""
        rows = np.flatnonzero(self.live)
        accepted = [counts[row] - 1 for row in rows]
        if self.parents is None:
            return Outcome(self.levels, 1, accepted, [True] * len(rows))
        path, parents = self.path.cpu().numpy(), self.parents.cpu().numpy()
        last = path[np.arange(len(path)), np.asarray(counts) - 1]
        leaves = ~(parents[:, 1:] == last[:, None]).any(1)
        return Outcome(self.levels, self.nodes, accepted, leaves[rows].tolist(), self.draft, path)


class Guide:
    """Asks a policy of the rounds of one batch."""

    def __init__(self, policy: Policy, drafter: Drafter):
        self.policy, self.drafter = policy, drafter
        # All that such a drafter keeps of positions is a cache. What others do with one costs little.
        self.holds = drafter.capturable and drafter.cache is not None
        self.held: Held | None = None
        self.joining: Held | None = None  # of rows that were prefilled, and not yet counted among the batch's
        self.played: Played | None = None  # the round that was asked for last

    def begin(self, sequences: abc.Sequence[Sequence]) -> int:
        """How many levels to draft in the next round of these rows."""
        live = np.array([s.finish is None for s in sequences])
        levels = self.policy.plan(int(live.sum()))
        asked = [levels if s.steps is None else min(s.steps, levels) for s in sequences]
        levels = max((most for most, alive in zip(asked, live, strict=True) if alive), default=levels)
        # A row that lets fewer levels count tells nothing of those behind them.
        self.played = Played(levels, live=live & (np.array(asked) >= levels))
        return self.played.levels

    def cut(self, tree: DraftTree, state: DraftState) -> DraftTree | None:
        """The part of a round's tree that is verified; None for the root alone. state: what the tree grew from."""
        if self.policy.cuts and tree.logq is not None:
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

    def learn(self, played: Played, counts: list[int]) -> None:
        if played.live.any():
            self.policy.learn(played.outcome(counts))

    def _draft(self, tree: DraftTree, state: DraftState) -> Draft:
        parents, drawn = tree.parents, tree.q is not None
        edges = tree.q.amax(-1).gather(1, parents).log() if drawn else tree.logq - tree.logq.gather(1, parents)
        sure = None
        if tree.topk is None and self.drafter.confident and tree.tokens.shape[1] == tree.steps + 1:
            sure = self.drafter.confidences(state, tree.tokens[:, 1:]).float().cpu().numpy()
        host = (x.cpu().numpy() for x in (edges.float(), parents, tree.depth, tree.ancestors))
        return Draft(self.played.levels, *host, self.played.live, drawn, sure)

    # What plain rounds leave to the drafter

    def hold(self, feats: Tensor | None, tokens: Tensor, n: Tensor, state: DraftState) -> DraftState:
        """Keep what a plain round brought, instead of letting the drafter absorb it at once. Returns the state, which
        is that of before."""
        if self.held is None:
            self.held = Held(feats, tokens.clone(), n)
        else:
            self.held.put(feats, tokens, n)
        return state

    def absorb(self, state: DraftState, max_len: int) -> DraftState:
        """Let the drafter absorb what was held."""
        held, self.held = self.held, None
        return state if held is None else held.absorb(self.drafter, state, max_len)

    def admit(self, row: int, first: Tensor, feats: Tensor | None, tokens: Tensor, n: Tensor) -> DraftState:
        """As `Drafter.admit`. After a plain round prompts are held too, and the drafter has the rows' places only."""
        self.joining = None
        if self.played is None or self.played.levels or not self.holds:
            return self.drafter.admit(row, first, feats, tokens, n)
        self.joining = Held(feats, tokens, n, tokens.shape[1])
        return self.drafter.admit(row, first, None if feats is None else feats[:, :1], tokens[:, :1], n * 0)

    def joined(self, before: int, rows: int) -> None:
        """The `rows` rows that were admitted last stand behind the `before` others now."""
        joining, self.joining = self.joining, None
        if self.held is None and joining is None:
            return
        known = self.held or joining.none(before)
        self.held = known.join(joining or known.none(rows))

    def compact(self, index: Tensor) -> None:
        """Go on with the rows index [B'] only."""
        if self.held is not None:
            self.held.compact(index)

    def forget(self) -> None:
        """No row goes on, so nobody will ask for what was held, nor for the last round."""
        self.held = self.played = None


class Held:
    """Committed positions that the drafter has not absorbed: features [B,K,F] (None without taps), tokens [B,K], of
    which the first n [B] count."""

    def __init__(self, feats: Tensor | None, tokens: Tensor, n: Tensor, most: int = 1):
        """most: of n, a bound on the host."""
        self.feats, self.tokens, self.n, self.most = feats, tokens, n, most
        self.new: list[tuple[Tensor | None, Tensor, Tensor]] = []  # of rounds since, one position each

    def put(self, feats: Tensor | None, tokens: Tensor, n: Tensor) -> None:
        """One more position for the rows of which n [B] is 1: feats [B,1,F], tokens [B,1]."""
        self.new.append((feats, tokens, n))

    def gather(self) -> "Held":
        """Put what came since to the rest: a plain round itself should take no time for it."""
        if self.new:
            feats, tokens, n = zip(*self.new, strict=True)
            count, self.new = len(self.new), []
            self._widen(self.most + count)
            places = self.n[:, None] + torch.arange(count, device=self.n.device)  # a row that ends stays so
            self.tokens.scatter_(1, places, torch.cat(tokens, 1))
            if self.feats is not None:
                self.feats.scatter_(1, places[..., None].expand(-1, -1, self.feats.shape[-1]), torch.cat(feats, 1))
            self.n = self.n + sum(n)
            self.most += count
        return self

    def _widen(self, width: int) -> "Held":
        more = width - self.tokens.shape[1]
        if more > 0:
            self.tokens = F.pad(self.tokens, (0, more))
            self.feats = None if self.feats is None else F.pad(self.feats, (0, 0, 0, more))
        return self

    def none(self, rows: int) -> "Held":
        """The same of so many rows that hold nothing."""
        feats = None if self.feats is None else self.feats.new_zeros(rows, 1, self.feats.shape[-1])
        return Held(feats, self.tokens.new_zeros(rows, 1), self.n.new_zeros(rows), 0)

    def join(self, other: "Held") -> "Held":
        """These rows, and below them those of `other`."""
        width = max(self.gather().tokens.shape[1], other.tokens.shape[1])
        both = self._widen(width), other._widen(width)
        feats = None if self.feats is None else torch.cat([held.feats for held in both])
        tokens, n = (torch.cat([getattr(held, name) for held in both]) for name in ("tokens", "n"))
        return Held(feats, tokens, n, max(self.most, other.most))

    def compact(self, index: Tensor) -> None:
        """Go on with the rows index [B'], and with no more places than they take: else a server that never drafts would
        hold more and more. This waits for the device."""
        self.gather()
        self.n = self.n[index]
        self.most = int(self.n.max()) if len(index) else 0
        self.tokens = self.tokens[index, : self.most]
        self.feats = None if self.feats is None else self.feats[index, : self.most]

    def absorb(self, drafter: Drafter, state: DraftState, max_len: int) -> DraftState:
        """The drafter's state behind all of it, HOLD positions at a time. A row's state is that of its last part."""
        self.gather()
        for first in range(0, self.most, HOLD):
            part = slice(first, min(first + HOLD, self.most))
            n = (self.n - first).clamp(0, HOLD)
            feats = None if self.feats is None else self.feats[:, part]
            new = drafter.extend(feats, self.tokens[:, part], n, max_len)
            state = _where(n > 0, new, state)
        return state


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


def _where(taken: Tensor, new: DraftState, old: DraftState) -> DraftState:
    """The rows of `new` that are taken [B], else those of `old`."""
    hidden, readout = (torch.where(taken[:, None, None], getattr(new, name), getattr(old, name))
                       for name in ("hidden", "readout"))  # fmt: skip
    levels = None if new.levels is None else torch.where(taken, new.levels, old.levels)
    return DraftState(hidden, readout, new.head, levels)
