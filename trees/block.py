"""The best tree over a block of guesses. A level has the same guesses for every node of the level above."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from specdec.children import LIKELIEST
from specdec.contracts import Children, Drafter, DraftState
from specdec.recording import Accepted, Recording
from specdec.structs import DraftTree
from specdec.trees.base import Tree, check_nodes, check_shape, check_size, shape_in, shape_of
from specdec.trees.dynamic import Pool, best_first, follow, select

MANY = 1 << 30  # nodes are not counted any further


class _Paths(Tree):
    """What a tree over a block chooses its paths from, level by level."""

    pairs: list[Tensor]  # of `candidate_pairs`
    sizes: list[int]  # the most nodes of a level
    starts: list[int]  # where a level begins in the pool


@dataclass(frozen=True)
class BlockTree(_Paths):
    """Select the most probable paths through a block whose slots are drafted at once (DDTree, arXiv 2604.12989).

    The tree has the root and the `num_draft_tokens` - 1 paths of up to `steps` tokens with the highest probability. A
    path has the product of its tokens' probabilities in their slots. DDTree has no bound `topk` on a node's children.
    Of equal paths of one length the one with the lower ranks comes first. A block with fewer slots than `steps` bounds
    the paths too. Its text is block 8/7/32.

    DDTree takes the nodes from a heap, one after the other. Here all nodes of a level are found at once. In a tree of n
    nodes, a level holds only its n best paths, which continue the n best paths of the level above. At least (i+1)(r+1)
    paths are as probable as the prefix of place i followed by the token of rank r, so about n log n of them are
    examined.
    """

    topk: int = 8
    steps: int = 16
    num_draft_tokens: int = 32

    marginals = True

    def __post_init__(self) -> None:
        """Check the sizes and compute the candidate pairs of each level."""
        shape = self.topk, self.steps
        check_shape(*shape)
        check_size(self.topk, nodes=self.num_draft_tokens)
        check_nodes(*shape, self.num_draft_tokens, most_nodes(*shape, self.num_draft_tokens))
        pairs = candidate_pairs(*shape, self.num_draft_tokens - 1)
        sizes = [min(self.num_draft_tokens - 1 - level, len(of)) for level, of in enumerate(pairs)]
        vars(self).update(pairs=pairs, sizes=sizes, starts=[sum(sizes[:level]) for level in range(len(sizes))])

    @classmethod
    @override
    def parse(cls, text: str) -> "BlockTree | None":
        shape = shape_in(text, "block ")
        return None if shape is None else cls(*shape)

    @property
    @override
    def text(self) -> str:
        return f"block {shape_of(self)}"

    def within(self, slots: int) -> "BlockTree":
        """The tree over a block of so many slots: itself, if it is no deeper."""
        if self.steps <= slots:
            return self
        return BlockTree(self.topk, slots, min(self.num_draft_tokens, most_nodes(self.topk, slots, MANY)))

    @override
    def smaller(self, steps: int) -> "BlockTree":
        return BlockTree(self.topk, steps, most_nodes(self.topk, steps, self.num_draft_tokens))

    @override
    def draft_slots(self) -> int:
        return 0  # no node is given to the drafter

    @override
    def grow(self, drafter: Drafter, root: Tensor, state: DraftState, children: Children = LIKELIEST) -> DraftTree:
        self.move(root.device)
        gains, ids = children.best(state.first(self.steps), drafter.vocab, slice(0, self.steps), self.topk)
        pool = self.best_paths(gains, drafter.vocab.to_target(ids))
        return select(root, pool, self.num_draft_tokens, self.steps)

    def best_paths(self, gains: Tensor, tokens: Tensor) -> Pool:
        """Return for each level the paths that can be in the tree, best first.

        gains, tokens [B,D,topk]: log-probabilities and target ids of the children of each level, best first.
        """
        scores, order = gains.new_zeros(len(gains), 1), tokens.new_zeros(len(gains), 1)
        levels = []
        for level, size in enumerate(self.sizes):
            prefix, rank = self.pairs[level].unbind(1)
            every = scores.index_select(1, prefix) + gains[:, level].index_select(1, rank)
            # The place of a path among all of its level, sorted by ranks.
            place = order.index_select(1, prefix) * self.topk + rank
            chosen = place.argsort(1)
            by_score = every.gather(1, chosen).argsort(dim=1, descending=True, stable=True)
            chosen = chosen.gather(1, by_score[:, :size])
            scores, order = every.gather(1, chosen), place.gather(1, chosen).argsort(1).argsort(1)
            parents = prefix[chosen] + (self.starts[level - 1] + 1 if level else 0)
            levels.append((tokens[:, level].gather(1, rank[chosen]), scores, parents))
        return Pool(*(torch.cat(parts, 1) for parts in zip(*levels, strict=True)))

    def replay(self, recording: Recording) -> Accepted:
        """Grow the tree by its own code, at all roots at once."""
        if self.steps > recording.steps == recording.block:
            return self.within(recording.steps).replay(recording)
        drafts = recording.levels(self.steps) > 0
        if "slots.gains" not in recording.tensors:
            raise ValueError("trees over blocks were not recorded: that takes slots that do not depend on each other")
        gains, tokens = (recording.tensors[f"slots.{part}"] for part in ("gains", "tokens"))
        if self.topk > (most := gains.shape[2]):
            raise ValueError(f"topk is {self.topk}, but the {most} best tokens of a slot were recorded")
        pool, n = self.best_paths(*(x[:, : self.steps, : self.topk] for x in (gains, tokens))), self.num_draft_tokens
        among = torch.zeros_like(pool.tokens, dtype=torch.bool).scatter_(1, best_first(pool.scores)[:, : n - 1], True)
        levels = [slice(start, start + size) for start, size in zip(self.starts, self.sizes, strict=True)]
        hit = follow(pool, levels, recording.following, among)
        return Accepted((hit >= 0).sum(1) * drafts, torch.where(drafts, n, 1), self.steps * drafts)


def most_nodes(topk: int, steps: int, enough: float = math.inf) -> int:
    """Return the number of nodes of the whole tree of `topk` children and `steps` levels, at most `enough`."""
    total = width = 1
    for _ in range(steps):
        width *= topk
        total += width
        if total >= enough:
            return int(enough)
    return total


def candidate_pairs(topk: int, steps: int, nodes: int) -> list[Tensor]:
    """Return for each level the candidates of a tree with `nodes` nodes below the root.

    A candidate is a pair of the place of a prefix among the best of the level above and the rank of the next token:
    [C,2] for each level. The ancestors of a candidate are candidates too.
    """
    pairs, prefixes = [], 1
    for level in range(steps):
        room = nodes - level
        found = [(i, r) for i in range(prefixes) for r in range(min(topk, room // (i + 1)))] if room > 0 else []
        if not found:
            break
        pairs.append(torch.tensor(found))
        prefixes = min(room, len(found))
    return pairs
