"""Connects an adaptive policy with the rounds of a batch: which trees they verify, and what the policy learns.

To choose nodes of a drafted tree, the host must see the tree. On a GPU that waits for the draft.
"""

import time
from collections import abc
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.contracts import DraftState
from specdec.engine.adaptive import Draft, Outcome, Policy
from specdec.engine.backlog import Backlog, Positions
from specdec.engine.report import Plan, RoundReport
from specdec.engine.sequence import Sequence
from specdec.structs import DraftTree, Survivors

NEVER = -30.0  # replaces the log-probability of a token of probability 0, as policies need finite numbers


def outcome_of(report: RoundReport, counts: list[int]) -> Outcome:
    """Return a round as its policy learns from it. counts [B]: tokens that each row emitted, before any cut."""
    plan = report.plan
    accepted = [counts[row] - 1 for row in plan.rows]
    if report.parents is None:
        return Outcome(plan.levels, 1, accepted, [True] * len(accepted))
    path, parents = report.path.tolist(), report.parents.tolist()  # lists, as numpy is slower for so few numbers
    leaves = [path[row][counts[row] - 1] not in parents[row][1:] for row in plan.rows]
    seen = None if plan.draft is None else np.asarray(path)
    return Outcome(plan.levels, report.nodes, accepted, leaves, plan.draft, seen)


class Controller:
    """Asks a policy about the rounds of one batch."""

    def __init__(self, policy: Policy, drafter: Any):
        """Let a policy choose the trees of the rounds for which this drafter drafts."""
        self.policy, self.drafter = policy, drafter
        # Whether plain rounds leave their positions for later. Such a drafter stores nothing of positions but a cache.
        # Other drafters absorb a position at little cost.
        self.defers = drafter.capturable and drafter.cache is not None
        self.backlog: Backlog | None = None
        self.joining: Positions | None = None  # of rows that were prefilled and have not joined the batch yet
        self.plan: Any = None  # a `Plan`, of the next round, or of the last one
        self.plain = False  # the last round was planned as a plain one
        self.like: DraftState | None = None  # a state of the drafter without rows, for its shape

    def begin(self, sequences: abc.Sequence[Sequence], state: DraftState, max_len: int) -> tuple[int, DraftState]:
        """Return the number of levels to draft in the next round of these rows, and the drafter's state.

        If there are levels, the drafter absorbs the backlog. max_len: as for `Drafter.extend`.
        """
        live = [i for i, sequence in enumerate(sequences) if sequence.finish is None]
        levels = self.policy.plan(len(live))
        if any(sequences[i].steps is not None for i in live):
            limits = {i: sequences[i].steps for i in live}
            asked = {i: levels if most is None else min(most, levels) for i, most in limits.items()}
            levels = max(asked.values())
            # A row for which fewer levels count says nothing about the levels after them.
            live = [i for i in live if asked[i] == levels]
        self.plan, self.plain = Plan(levels, live), levels == 0
        if levels and self.backlog is not None:
            state, self.backlog = self.backlog.absorb(self.drafter, state, max_len), None
        return levels, state

    def cut(self, tree: DraftTree, state: DraftState) -> DraftTree | None:
        """Return the part of a round's tree that is verified; None for the root alone. state: the tree's root state."""
        if tree.logq is None or not self.policy.looks():
            return tree
        draft = self._draft(tree, state)
        selected = self.policy.keep(draft)
        if selected is not None and selected.shape[1] == 1:
            return None
        self.plan.draft = draft if selected is None else part_of(draft, selected)
        if selected is None:
            return tree
        return trimmed(tree, torch.from_numpy(np.ascontiguousarray(selected)).to(tree.tokens.device))

    def played(self, report: RoundReport) -> None:
        """Note the plan of a round that was started, and take the positions that it leaves to the drafter."""
        report.plan = self.plan
        if report.deferred is not None:
            self.backlog = self.backlog or Backlog(len(report.deferred.n))
            self.backlog.add(report.deferred)

    def learn(self, report: RoundReport, counts: list[int]) -> None:
        """Let the policy learn from a round that was read."""
        if report.plan.rows:
            self.policy.learn(outcome_of(report, counts))

    def _draft(self, tree: DraftTree, state: DraftState) -> Draft:
        parents, drawn = tree.parents, tree.q is not None
        q: Any = tree.q
        logq: Any = tree.logq
        edges = q.amax(-1).gather(1, parents).log() if drawn else logq - logq.gather(1, parents)
        edges = edges.nan_to_num(nan=NEVER, neginf=NEVER)  # below a node of probability 0 there is no difference
        sure = None
        if tree.topk is None and self.drafter.confident and tree.tokens.shape[1] == tree.steps + 1:
            sure = self.drafter.confidences(state, tree.tokens[:, 1:]).float().cpu().numpy()
        host = [x.cpu().numpy() for x in (edges.float(), parents, tree.depth, tree.ancestors)]
        live = np.zeros(len(parents), dtype=bool)
        live[self.plan.rows] = True
        return Draft(self.plan.levels, host[0], host[1], host[2], host[3], live, drawn, sure)

    # What plain rounds leave to the drafter

    def admit(self, row: int, first: Tensor, feats: Tensor | None, tokens: Tensor, n: Tensor) -> DraftState:
        """As `Drafter.admit`. After a plain round prompts go to the backlog too, and the drafter only makes room."""
        self.joining = None
        if not (self.plain and self.defers):
            begun = time.perf_counter()
            state = self.drafter.admit(row, first, feats, tokens, n)
            self.policy.joined(len(first), time.perf_counter() - begun)
            self.like = self.like or state.blank(0)
            return state
        self.policy.joined(len(first), None)
        self.joining = Positions(feats, tokens, n)
        if self.drafter.keeps_first or self.like is None:
            return self.drafter.admit(row, first, None if feats is None else feats[:, :1], tokens[:, :1], n * 0)
        self.drafter.cache.admit(row, len(first), 0)
        return self.like.blank(len(first))

    def joined(self, first: int, rows: int) -> None:
        """The rows that were admitted last are the batch's rows from `first` on."""
        joining, self.joining = self.joining, None
        if joining is not None:
            self.backlog = self.backlog or Backlog(first)
        if self.backlog is not None:
            self.backlog.join(rows, joining)

    def compact(self, selected: Survivors) -> None:
        """Drop all rows except these."""
        if self.backlog is not None:
            self.backlog.compact(selected)

    def forget(self) -> None:
        """Drop the backlog and the last plan: no row is left."""
        self.backlog = self.plan = None


def trimmed(tree: DraftTree, selected: Tensor) -> DraftTree:
    """Return the tree of the selected nodes [B,n]: ascending, root first, closed under parents."""
    n, whole = selected.shape[1], tree.tokens.shape[1]
    tokens, depth = tree.tokens.gather(1, selected), tree.depth.gather(1, selected)
    parents = torch.searchsorted(selected, tree.parents.gather(1, selected))
    rows = tree.ancestors.gather(1, selected[..., None].expand(-1, -1, whole))
    ancestors = rows.gather(2, selected[:, None].expand(-1, n, -1))
    logq = None if tree.logq is None else tree.logq.gather(1, selected)
    q = None if tree.q is None else tree.q.gather(1, selected[..., None].expand(-1, -1, tree.q.shape[-1]))
    return replace(tree, tokens=tokens, parents=parents, depth=depth, ancestors=ancestors,
                   steps=min(tree.steps, n - 1), logq=logq, q=q)  # fmt: skip


def part_of(draft: Draft, selected: np.ndarray) -> Draft:
    """Return the part of a draft that is verified."""
    parents = np.take_along_axis(draft.parents, selected, 1)
    places = (selected[:, None] == parents[..., None]).argmax(-1)
    edges, depth = (np.take_along_axis(x, selected, 1) for x in (draft.edges, draft.depth))
    rows = np.take_along_axis(draft.ancestors, selected[..., None], 1)
    ancestors = np.take_along_axis(rows, selected[:, None], 2)
    return replace(draft, edges=edges, parents=places, depth=depth, ancestors=ancestors)
