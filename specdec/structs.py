"""Shapes and value types of the whole project.

    B batch rows   N tree nodes (root included)   D depth (steps)   P = D+1 path slots   W beam width (topk)
    T prompt tokens   S cache slots   L layers   H hidden size   F = len(taps)*H   K kv heads   Dh head size
    V target vocabulary   U draft vocabulary

Ints are int64 on the device, masks are bool, scores and probabilities are fp32.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from specdec.sampling_settings import Sampling as Sampling


@dataclass
class DraftTree:
    """Candidate continuations. Node 0 is the root: the last emitted token, which the target has not seen yet.

    Nodes are sorted breadth first, so parents[b, i] < i for i > 0 (the root is its own parent). Siblings carry
    different tokens.
    """

    tokens: Tensor  # [B, N] target vocabulary ids
    parents: Tensor  # [B, N]
    depth: Tensor  # [B, N], root 0
    ancestors: Tensor  # [B, N, N] bool: ancestors[b, i, j] = j lies on the path from the root to i, i included
    steps: int  # D: no node is deeper, so a path has at most P = D + 1 nodes
    logq: Tensor | None = None  # [B, N] log-probability of the path under the drafter, root 0
    # [B, N, V] what each node's children were drawn from, in order of index, without replacement. Children to which it
    # gives nothing were not drawn: they followed when it was used up.
    q: Tensor | None = None
    topk: int | None = None  # the most children of a node; here so that a verifier with q need not read a tensor for it

    def drawn_from(self) -> tuple[Tensor, int]:
        """Return `q` and `topk`. Raises ValueError for a tree whose children were not drawn."""
        if self.q is None or self.topk is None:
            raise ValueError("this verifier needs a tree whose children were drawn from the drafter")
        return self.q, self.topk


@dataclass
class Verdict:
    """What one verification decided."""

    path: Tensor  # [B, P] accepted nodes, root first; entries from n on are 0
    n: Tensor  # [B] number of emitted tokens, 1..P
    tokens: Tensor  # [B, P] emitted tokens: tokens[:, k] follows node path[:, k]; entries from n on are void


class DraftVocab(nn.Module):
    """The target's tokens that a drafter can propose: ids [U] in draft order, or all V of them (`ids` None)."""

    ids: Tensor | None

    def __init__(self, target_size: int, ids: Tensor | None = None):
        """Take distinct target ids [U] in draft order; None: all `target_size` tokens."""
        super().__init__()
        if ids is not None:
            ids = ids.long()
            if ids.ndim != 1 or len(ids) == 0 or ids.min() < 0 or ids.max() >= target_size:
                raise ValueError(f"a draft vocabulary must hold token ids from 0 to {target_size - 1}")
            if len(ids.unique()) != len(ids):
                raise ValueError("a draft vocabulary must not name a token twice")
        self.target_size = target_size
        self.size = target_size if ids is None else len(ids)
        self.register_buffer("ids", ids, persistent=False)

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Map ids of the draft vocabulary to ids of the target's, any shape."""
        return draft_ids if self.ids is None else self.ids.take(draft_ids)

    def from_target(self, target_ids: Tensor) -> Tensor:
        """Map ids of the target's vocabulary to draft ids, any shape; -1 for tokens that cannot be proposed."""
        if self.ids is None:
            return target_ids
        place = torch.full((self.target_size,), -1, device=self.ids.device)
        place[self.ids] = torch.arange(self.size, device=self.ids.device)
        return place[target_ids]

    def select(self, logits: Tensor) -> Tensor:
        """Select the columns of the draft vocabulary: [..., V] -> [..., U]."""
        return logits if self.ids is None else logits.index_select(-1, self.ids)

    def contains(self) -> Tensor:
        """[V] bool: is the target token in the draft vocabulary (EAGLE's t2d)?"""
        if self.ids is None:
            return torch.ones(self.target_size, dtype=torch.bool)
        return torch.zeros(self.target_size, dtype=torch.bool, device=self.ids.device).index_fill(0, self.ids, True)


class Survivors:
    """The rows of a batch that continue when others end.

    The last of them take the places of the ended ones, so dropping one row of many costs the move of one.
    """

    def __init__(self, ended: Sequence[bool], device: torch.device):
        """Find the surviving rows. ended: of every row."""
        self.count = sum(not over for over in ended)  # B'
        later = (row for row in range(self.count, len(ended)) if not ended[row])
        # Of each row that moves, where it is and where it goes. No place is among both.
        self.moves = [(next(later), place) for place in range(self.count) if ended[place]]
        self.rows = list(range(self.count))  # what each place holds from now on
        for source, place in self.moves:
            self.rows[place] = source
        self.index = torch.tensor(self.rows, dtype=torch.int64, device=device)  # [B'] the same

    def of(self, items: list) -> list:
        """Select from a list with an item for every row those of the surviving rows."""
        return [items[row] for row in self.rows]


class SamplingBatch:
    """The `Sampling` of each row of a batch whose rows differ, for `sampling.filters` and logits [B, ..., V]."""

    def __init__(self, rows: Sequence[Sampling], device: torch.device):
        """Put the settings of the rows into tensors on the device."""

        def column(values: list) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)  # whatever torch's default is

        self.greedy = torch.tensor([s.greedy for s in rows], device=device)
        self.temperature = column([s.temperature or 1.0 for s in rows])
        self.top_k = torch.tensor([s.top_k for s in rows], device=device)
        self.tail = column([1.0 - s.top_p for s in rows])  # the mass that top-p may leave out
        self.min_p = column([s.min_p for s in rows])
        # What no row asks for is not computed.
        self.any_cut = any(s.top_k or s.top_p < 1 for s in rows)
        self.any_min_p = any(s.min_p for s in rows)

    @property
    def program(self) -> tuple[bool, ...]:
        """The filters that decide which operators run. A CUDA graph is captured for each value."""
        return self.any_cut, self.any_min_p


class Verifier(Protocol):
    """Rule that decides which tokens of a draft tree are emitted.

    Attributes:
        lossless: The output is distributed as the target's own.
        needs_q: It works on trees of policies that sample only.
        chains_only: It works on chains only, trees without siblings.
        likeliest_only: At temperature 0 it needs the most likely tokens of logits, and no probabilities.
        couples: It emits the target's draws by the row's noise at each node, so drafts may use that noise.
    """

    lossless: bool = True
    needs_q: bool = False
    chains_only: bool = False
    likeliest_only: bool = False
    couples: bool = False

    def __call__(
        self, tree: DraftTree, logits: Tensor, sampling: Sampling | SamplingBatch, noise: Any | None
    ) -> Verdict:
        """Return what is emitted, by logits [B,N,V] of the target at each node, penalties taken off.

        noise: `sampling.noise.RoundNoise` of the depths of the tree's nodes, None at temperature 0.
        """
