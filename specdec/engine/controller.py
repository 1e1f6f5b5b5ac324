"""Connects an adaptive policy with the rounds of a batch: which trees they verify, and what the policy learns.

To choose nodes of a drafted tree, the host must see the tree. On a GPU that waits for the draft.

Plain rounds and prompts leave committed positions for the drafter to absorb later. Storing a position copies nothing:
tensors are stored as they came, with the ids of the rows that they belong to.
"""

import time
from collections import abc
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec import own
from specdec.contracts import Drafter, DraftState
from specdec.engine.adaptive import Draft, Outcome, Policy, flaw_of
from specdec.engine.report import Plan, Positions, RoundReport
from specdec.engine.sequence import Sequence
from specdec.schema import shown
from specdec.structs import DraftTree, Survivors

NEVER = -30.0  # replaces the log-probability of a token of probability 0, as policies need finite numbers
ABSORBED = 32  # positions that the drafter absorbs at once
MOST_PARTS = 256  # more parts are merged into one


class Controller:
    """Asks a policy about the rounds of one batch."""

    def __init__(self, policy: Policy, drafter: Any, most: int):
        """Let a policy choose the trees of the rounds for which this drafter drafts, of `most` levels at most."""
        self.policy, self.drafter, self.most = policy, drafter, most
        # Whether plain rounds leave their positions for later. Such a drafter stores nothing of positions but a cache.
        # Other drafters, and those that look tokens up, absorb a position at little cost.
        self.defers = drafter.capturable and drafter.cache is not None and not drafter.abstains
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
        levels, others = self.policy.plan(len(live)), []
        if not hasattr(levels, "__index__") or not 0 <= levels <= self.most:
            raise ValueError(f"the policy {self.policy.name} plans {shown(levels)} levels: the tree has {self.most}")
        if any(sequences[i].steps is not None for i in live):
            limits = {i: sequences[i].steps for i in live}
            asked = {i: levels if most is None else min(most, levels) for i, most in limits.items()}
            levels = max(asked.values())
            others = [i for i in live if asked[i] < levels]
            live = [i for i in live if asked[i] == levels]
        self.plan, self.plain = Plan(levels, live, others), levels == 0
        if levels and self.backlog is not None:
            state, self.backlog = self.backlog.absorb(self.drafter, state, max_len), None
        return levels, state

    def cut(self, tree: DraftTree, state: DraftState) -> DraftTree | None:
        """Return the part of a round's tree that is verified; None for the root alone. state: the tree's root state."""
        if tree.logq is None or not self.policy.looks():
            return tree
        draft = self._draft(tree, state)
        selected = self.policy.keep(draft)
        if selected is not None and own.name_of(self.policy) and (wrong := flaw_of(selected, draft)):
            raise ValueError(f"the policy {self.policy.name} keeps nodes that are no tree: {wrong}")
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
        """Let the policy learn from a round that was read. counts [B]: tokens that each row emitted, before any cut."""
        if not (plan := report.plan).rows:
            return
        accepted, others = ([counts[row] - 1 for row in rows] for rows in (plan.rows, plan.others))
        if report.parents is None:
            self.policy.learn(Outcome(plan.levels, 1, accepted, [True] * len(accepted), others=others))
            return
        path, parents = report.path.tolist(), report.parents.tolist()  # lists, as numpy is slower for so few numbers
        leaves = [path[row][counts[row] - 1] not in parents[row][1:] for row in plan.rows]
        seen = None if plan.draft is None else np.asarray(path)
        self.policy.learn(Outcome(plan.levels, report.nodes, accepted, leaves, plan.draft, seen, others))

    def _draft(self, tree: DraftTree, state: DraftState) -> Draft:
        parents, drawn = tree.parents, tree.q is not None
        q: Any = tree.q
        logq: Any = tree.logq
        edges = q.amax(-1).gather(1, parents).log() if drawn else logq - logq.gather(1, parents)
        edges = edges.nan_to_num(nan=NEVER, neginf=NEVER)  # below a node of probability 0 there is no difference
        sure = None
        if tree.topk is None and self.drafter.confident and tree.tokens.shape[1] == tree.steps + 1:
            sure = self.drafter.confidences(state, tree.tokens[:, 1:]).float().cpu().numpy()
        # Copies: a policy may write to them.
        host = [x.cpu().numpy().copy() for x in (edges.float(), parents, tree.depth, tree.ancestors)]
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


@dataclass
class Part:
    """The positions of a prefill, or of consecutive plain rounds with the same rows."""

    ids: list[int]  # of its rows [R]
    rounds: list[Positions]

    def index(self, place_of: dict[int, int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return, for the rows still in the batch, places in the batch and in this part, and numbers of positions.

        The positions that count come first: once a row has ended, none of its positions counts.
        """
        first, *others = [positions.n for positions in self.rounds]
        counts = sum(others, first)
        here = [row for row, id_ in enumerate(self.ids) if id_ in place_of]
        places = torch.tensor([place_of[self.ids[row]] for row in here], device=counts.device)
        rows = torch.tensor(here, device=counts.device)
        return places, rows, counts[rows]

    def joined(self) -> tuple[Tensor | None, Tensor]:
        """Return the features [R,K,F] and tokens [R,K] of all rounds, concatenated."""
        tokens = torch.cat([positions.tokens for positions in self.rounds], 1)
        feats = [positions.feats for positions in self.rounds if positions.feats is not None]
        return torch.cat(feats, 1) if feats else None, tokens


class Backlog:
    """Committed positions that the drafter has not absorbed.

    Rows have ids that never change, so parts stay as they are when rows leave or move.
    """

    def __init__(self, rows: int):
        """Begin without positions, for a batch of this many rows."""
        self.ids, self.count = list(range(rows)), rows  # ids: of the batch's rows; count: of the ids in use so far
        self.parts: list[Part] = []

    def add(self, positions: Positions) -> None:
        """Store one more position of all rows. It counts for the rows of which n [B] is 1."""
        if not self.parts or self.parts[-1].ids is not self.ids:  # `join` and `compact` make a new list of ids
            self.parts.append(Part(self.ids, []))
        self.parts[-1].rounds.append(positions)

    def join(self, rows: int, prompts: Positions | None = None) -> None:
        """Append rows to those of the batch, with the positions of their prompts."""
        new = self._new(rows)
        self.ids = self.ids + new
        if prompts is not None:
            self.parts.append(Part(new, [prompts]))

    def _new(self, rows: int) -> list[int]:
        self.count += rows
        return list(range(self.count - rows, self.count))

    def compact(self, survivors: Survivors) -> None:
        """Drop all rows except these."""
        self.ids = survivors.of(self.ids)
        # A server that never drafts would store the positions of rows that have left for long.
        here = set(self.ids)
        self.parts = [part for part in self.parts if not here.isdisjoint(part.ids)]
        if len(self.parts) > MOST_PARTS:
            self.parts = [Part(self.ids[:], [self.padded()])]  # rows differ in length: no round may follow in this part

    def padded(self) -> Positions:
        """Return all positions as those of one round with the batch's rows. This waits for the device."""
        some = self.parts[0].rounds[0]
        n = torch.zeros(len(self.ids), dtype=torch.int64, device=some.tokens.device)
        place_of = {id_: place for place, id_ in enumerate(self.ids)}
        found = [part.index(place_of) for part in self.parts]
        starts = []
        for places, _, count in found:
            starts.append(n[places])
            n[places] += count
        width = int(n.max())
        # Positions that do not count go to an extra last place, which is cut off.
        tokens = some.tokens.new_zeros(len(self.ids), width + 1)
        feats = None if some.feats is None else some.feats.new_zeros(*tokens.shape, some.feats.shape[-1])
        for part, (places, rows, count), start in zip(self.parts, found, starts, strict=True):
            part_feats, part_tokens = part.joined()
            at = torch.arange(part_tokens.shape[1], device=n.device)
            to = places[:, None], torch.where(at < count[:, None], start[:, None] + at, width)
            tokens[to] = part_tokens[rows]
            if feats is not None and part_feats is not None:
                feats[to] = part_feats[rows]
        return Positions(None if feats is None else feats[:, :width], tokens[:, :width], n)

    def absorb(self, drafter: Drafter, state: DraftState, max_len: int) -> DraftState:
        """Let the drafter absorb all positions, ABSORBED at a time. Return each row's state after its last position.

        Rows of the state without an id hold no sequence.
        """
        if not self.parts:
            return state
        self.ids = self.ids + self._new(len(state.hidden) - len(self.ids))
        all_ = self.padded()
        for first in range(0, all_.tokens.shape[1], ABSORBED):
            part = slice(first, first + ABSORBED)
            count = (all_.n - first).clamp(0, ABSORBED)
            feats = None if all_.feats is None else all_.feats[:, part]
            new = drafter.extend(feats, all_.tokens[:, part], count, max_len)
            state = _where(count > 0, new, state)
        return state


def _where(taken: Tensor, new: DraftState, old: DraftState) -> DraftState:
    """Return the rows of `new` that are taken [B], and the others of `old`."""
    hidden, readout = (torch.where(taken[:, None, None], getattr(new, name), getattr(old, name))
                       for name in ("hidden", "readout"))  # fmt: skip
    levels = None if new.levels is None or old.levels is None else torch.where(taken, new.levels, old.levels)
    return DraftState(hidden, readout, new.head, levels)
