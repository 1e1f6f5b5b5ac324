"""A tree whose children can be drawn from the drafter's distribution, without replacement."""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

from specdec.children import LIKELIEST
from specdec.contracts import Children, Drafter, DraftState, Vocabulary
from specdec.structs import DraftTree
from specdec.trees.ancestors import ancestors_of
from specdec.trees.bounds import check_size


class SampledTree:
    """`expansion` says how many children each node draws, level by level: SpecInfer's expansion configuration (arXiv
    2305.09781). (1, 1, 1) is a chain; (3, 1, 1) are three chains from different first tokens.

    The shape never depends on what was drawn: to keep the best of the draws would change the distribution that a
    verifier takes them to come from. At temperature 0 the children are the most likely tokens.
    """

    samples = True
    marginals = False

    def __init__(self, expansion: Sequence[int] = (3, 1, 1, 1, 1)):
        self.expansion = tuple(expansion)
        if not self.expansion or min(self.expansion) < 1:
            raise ValueError(f"expansion must give at least one child on each of one or more levels, got {expansion}")
        self.steps, self.topk = len(self.expansion), max(self.expansion)
        self.sizes = list(accumulate(self.expansion, mul, initial=1))  # nodes of level 0, 1, ... D
        self.starts = list(accumulate(self.sizes, initial=0))
        self.num_draft_tokens = self.starts[-1]
        check_size(self.topk, self.steps, self.num_draft_tokens)
        self.width = self.sizes[-2]  # nodes that the drafter expands on every level: shorter ones repeat their last
        self.depth = torch.arange(self.steps + 1).repeat_interleave(torch.tensor(self.sizes))
        parents = [torch.zeros(1, dtype=torch.int64)]
        for start, size, branch in zip(self.starts, self.sizes, self.expansion, strict=False):
            parents.append(torch.arange(start, start + size).repeat_interleave(branch))
        self.parents = torch.cat(parents)
        self.ancestors = ancestors_of(self.parents[None], self.steps)[0]

    def shallower(self, steps: int) -> "SampledTree":
        return SampledTree(self.expansion[:steps])

    def smaller(self, steps: int) -> "SampledTree":
        return self.shallower(steps)

    def draft_slots(self) -> int:
        return self.width * (self.steps - 1)

    def grow(self, drafter: Drafter, root: Tensor, state: DraftState, children: Children = LIKELIEST) -> DraftTree:
        b, n = len(root), self.num_draft_tokens
        self._move(root.device)
        vocab = drafter.vocab
        q = Proposed(b, n, vocab, root.device) if children.drawn else None
        first, state = state, drafter.root(state)
        tokens, logq = [root[:, None]], [torch.zeros(b, 1, device=root.device)]
        for level, branch in enumerate(self.expansion, 1):
            parents = slice(self.starts[level - 1], self.starts[level])
            here = state.first(self.sizes[level - 1])
            if q is None:
                gains, ids = children.best(here, vocab, level - 1, branch)
            else:
                logits = here.logits.float()
                probs, ids = children.draw(logits, vocab, level - 1, branch)
                q.put(parents, probs)
                gains = logits.log_softmax(-1).gather(-1, ids)
            tokens.append(vocab.to_target(ids).flatten(1))
            logq.append((logq[-1][..., None] + gains).flatten(1))
            if level < self.steps:
                frontier, ancestors = self._frontier(level, root.device)
                hidden = state.hidden[:, frontier // branch]
                state = drafter.expand(first, tokens[-1][:, frontier], hidden, level, ancestors.expand(b, -1, -1))
        return DraftTree(
            tokens=torch.cat(tokens, 1),
            parents=self.parents.expand(b, n),
            depth=self.depth.expand(b, n),
            ancestors=self.ancestors.expand(b, n, n),
            steps=self.steps,
            logq=torch.cat(logq, 1),
            q=None if q is None else q.probs,
            topk=self.topk,
        )

    def _move(self, device: torch.device) -> None:
        if self.parents.device != device:
            self.parents, self.depth, self.ancestors = (
                x.to(device) for x in (self.parents, self.depth, self.ancestors)
            )

    def _frontier(self, level: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The W nodes of a level that the drafter expands, counted from its first: [W]; and which of the level*W
        positions given to it so far each descends from, itself included: [W, level*W]."""
        w, size = self.width, self.sizes[level]
        slots = torch.arange(w, device=device)
        frontier = slots.clamp(max=size - 1)
        above = [frontier * self.sizes[m] // size for m in range(1, level)]
        return frontier, torch.cat([place[:, None] == slots for place in [*above, slots]], 1)


class Proposed:
    """What the children of N nodes were drawn from, over the target's vocabulary: probs [B,N,V]."""

    def __init__(self, rows: int, nodes: int, vocab: Vocabulary, device: torch.device):
        self.places = vocab.to_target(torch.arange(vocab.size, device=device))
        self.probs = torch.zeros(rows, nodes, vocab.target_size, device=device)

    def put(self, nodes: slice, probs: Tensor) -> None:
        """probs [B,n,U] of some nodes over the draft vocabulary."""
        self.probs[:, nodes].index_copy_(2, self.places, probs)
