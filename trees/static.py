"""Trees of one shape for every round: paths of child ranks, a chain, and children that are drawn."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from operator import mul
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from specdec.children import LIKELIEST
from specdec.contracts import Children, Drafter, DraftState, TreePolicy
from specdec.recording import Accepted, Recording
from specdec.structs import DraftTree, DraftVocab
from specdec.trees.base import Tree, ancestors_of, check_chains, check_size, shape_in

RankPath = tuple[int, ...]


class Level(NamedTuple):
    """One level of the tree; its W expanded nodes are, if fewer have children, the first of them again and again."""

    nodes: Tensor  # [n] places of the level's nodes among the children of the W nodes of the level above
    inner: Tensor  # [W] which of the nodes are expanded
    parents: Tensor  # [W] places of their parents among the expanded nodes of the level above
    ancestors: Tensor  # [1, W, level * W] bool, as `Drafter.step` wants them


class FixedTree(Tree):
    """A tree whose shape is known before anything is drafted, and a policy that grows it level by level.

    Only nodes with children are expanded: on every level W, as many as the level with the most of them has.
    """

    paths: Sequence[Sequence[int]]
    steps: int
    topk: int
    num_draft_tokens: int
    counts: tuple[int, ...]
    parents: Tensor
    depth: Tensor
    visible: Tensor
    of_root: Tensor  # its log-probability
    levels: list[Level]
    width: int

    def _shape(self, paths: Sequence[RankPath], counts: Sequence[int]) -> None:
        """paths: of all nodes but the root. counts: how many children the drafter is asked for, level by level."""
        paths = sorted(paths, key=lambda path: (len(path), path))  # breadth first
        place = {path: node for node, path in enumerate([(), *paths])}
        parents, levels = torch.tensor([0, *(place[path[:-1]] for path in paths)]), _levels(paths, counts)
        vars(self).update(
            paths=tuple(paths),
            steps=len(counts),
            topk=max(counts),
            num_draft_tokens=len(paths) + 1,
            counts=tuple(counts),
            parents=parents,
            depth=torch.tensor([0, *map(len, paths)]),
            visible=ancestors_of(parents[None], len(counts))[0],
            of_root=torch.zeros(1, 1),
            levels=levels,
            width=len(levels[0].inner),
        )

    @override
    def smaller(self, steps: int) -> TreePolicy:
        return self.shallower(steps)

    @override
    def draft_slots(self) -> int:
        return self.width * (self.steps - 1)

    @override
    def grow(self, drafter: Drafter, root: Tensor, state: DraftState, children: Children = LIKELIEST) -> DraftTree:
        self.move(root.device)
        b, vocab = len(root), drafter.vocab
        drawn = []  # what children of each level's nodes were drawn from
        tokens, scores = [root[:, None]], [self.of_root.expand(b, 1)]
        first, state = state, drafter.root(state)
        expanded = scores[0]  # [B,W] path scores of the nodes that are expanded
        for depth, (level, count) in enumerate(zip(self.levels, self.counts, strict=True), 1):
            if children.drawn:
                logits = state.logits.float()
                probs, ids = children.draw(logits, vocab, depth - 1, count)
                drawn.append(probs[:, : tokens[-1].shape[1]])
                gains = logits.log_softmax(-1).gather(-1, ids)
            else:
                gains, ids = children.best(state, vocab, depth - 1, count)
            scores.append((expanded[..., None] + gains).flatten(1).index_select(1, level.nodes))
            tokens.append(vocab.to_target(ids.flatten(1).index_select(1, level.nodes)))
            if depth < self.steps:
                expanded = scores[-1].index_select(1, level.inner)
                hidden = state.hidden.index_select(1, level.parents)
                ancestors = level.ancestors.expand(b, -1, -1)
                inner = tokens[-1].index_select(1, level.inner)
                state = drafter.expand(first, inner, hidden, depth, ancestors)
        q = self._over_target(torch.cat(drawn, 1), vocab) if drawn else None
        return self._tree(torch.cat(tokens, 1), torch.cat(scores, 1), q)

    def replay(self, recording: Recording) -> Accepted:
        """The text runs through the tree as far as the ranks of its tokens are a path of it."""
        levels, ranks = recording.levels(self.steps), recording.tensors["ranks"]
        accepted = torch.zeros_like(levels)
        for path in self.paths:  # breadth first: what is deeper comes later
            accepted[(ranks[:, : len(path)] == torch.tensor(path)).all(1)] = len(path)
        nodes = (self.depth.cpu() <= levels[:, None]).sum(1)
        return Accepted(accepted.minimum(levels), nodes, levels)

    def _over_target(self, probs: Tensor, vocab: DraftVocab) -> Tensor:
        """Map probabilities [B,n,U] of the first n nodes over the draft vocabulary to [B,N,V] over the target's."""
        q = probs.new_zeros(len(probs), self.num_draft_tokens, vocab.target_size)
        places = vocab.to_target(torch.arange(vocab.size, device=probs.device))
        q[:, : probs.shape[1]].index_copy_(2, places, probs)
        return q

    def _tree(self, tokens: Tensor, logq: Tensor, q: Tensor | None = None) -> DraftTree:
        b, n = tokens.shape
        shape = self.parents.expand(b, n), self.depth.expand(b, n), self.visible.expand(b, n, n)
        return DraftTree(tokens, *shape, self.steps, logq, q, self.topk if self.samples else None)


@dataclass(frozen=True)
class StaticTree(FixedTree):
    """Draft the nodes named by `paths`, in Medusa's form (arXiv 2401.10774).

    [0, 2] is the third most likely child of the most likely child of the root, which is not listed. Every path without
    its last rank must be listed too. The text is paths 0 1 0.2.
    """

    paths: Sequence[Sequence[int]]

    fixed = True

    def __post_init__(self) -> None:
        """Check that every listed path has its parent, and compute the shape."""
        found = _checked(self.paths)
        topk, steps = 1 + max(path[-1] for path in found), max(map(len, found))
        check_size(topk, steps, len(found) + 1)
        self._shape(found, [topk] * steps)

    @classmethod
    @override
    def parse(cls, text: str) -> "StaticTree | None":
        found = re.fullmatch(r"paths( \d+(\.\d+)*)+", text)
        return found and cls([[int(rank) for rank in path.split(".")] for path in text.split(" ")[1:]])

    @property
    @override
    def text(self) -> str:
        return "paths " + " ".join(".".join(map(str, path)) for path in self.paths)

    @override
    def shallower(self, steps: int) -> "StaticTree":
        return StaticTree([path for path in self.paths if len(path) <= steps])


@dataclass(frozen=True, order=True)
class Chain(FixedTree):
    """One path of `steps` drafted tokens; the dynamic tree with topk 1, without its bookkeeping. Written 1/5/6."""

    steps: int = 5

    def __post_init__(self) -> None:
        """Check `steps` and compute the shape."""
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")
        check_size(steps=self.steps)
        self._shape([(0,) * depth for depth in range(1, self.steps + 1)], [1] * self.steps)

    @classmethod
    @override
    def parse(cls, text: str) -> "Chain | None":
        shape = shape_in(text)
        if shape is None or shape[0] != 1:
            return None
        check_chains(*shape)
        return cls(shape[1])

    @override
    def shallower(self, steps: int) -> "Chain":
        return Chain(steps)

    @override
    def grow(self, drafter: Drafter, root: Tensor, state: DraftState, children: Children = LIKELIEST) -> DraftTree:
        self.move(root.device)
        tokens, logq = drafter.chain(state, self.steps, children)
        logq = torch.cat([self.of_root.expand(len(root), 1), logq], 1)
        return self._tree(torch.cat([root[:, None], tokens], 1), logq)


@dataclass(frozen=True)
class SampledTree(FixedTree):
    """Draw the children of each node from the drafter, as many as `expansion` gives for the level.

    This is SpecInfer's expansion configuration (arXiv 2305.09781). (1, 1, 1) is a chain; (3, 1, 1) are three chains
    with different first tokens. The text is drawn 3,1,1.

    The shape never depends on what was drawn: to keep the best draws would change the distribution that the verifier
    assumes. At temperature 0 the children are the most likely tokens.
    """

    expansion: tuple[int, ...] = (3, 1, 1, 1, 1)

    samples = True

    def __post_init__(self) -> None:
        """Check `expansion`, a number of children of at least 1 for each level, and compute the shape."""
        expansion = tuple(self.expansion)
        if not expansion or min(expansion) < 1:
            raise ValueError(f"expansion must give at least one child on each of one or more levels, got {expansion}")
        vars(self)["expansion"] = expansion
        steps, nodes = len(expansion), sum(accumulate(expansion, mul, initial=1))
        check_size(max(expansion), steps, nodes)
        ranks = [range(count) for count in expansion]
        self._shape([path for d in range(1, steps + 1) for path in product(*ranks[:d])], expansion)

    @classmethod
    @override
    def parse(cls, text: str) -> "SampledTree | None":
        found = re.fullmatch(r"drawn (\d+(,\d+)*)", text)
        return found and cls(tuple(map(int, found[1].split(","))))

    @property
    @override
    def text(self) -> str:
        return "drawn " + ",".join(map(str, self.expansion))

    @override
    def shallower(self, steps: int) -> "SampledTree":
        return SampledTree(self.expansion[:steps])

    @override
    def replay(self, recording: Recording) -> Accepted:
        return Tree.replay(self, recording)  # what was drawn is not the text


def _checked(paths: Sequence[Sequence[int]]) -> list[RankPath]:
    """The paths, as tuples; ValueError unless they make a tree."""
    if not paths:
        raise ValueError("a static tree needs paths, such as [[0], [1], [0, 0]]")
    known: set[RankPath] = set()
    for path in paths:
        listed = isinstance(path, Sequence) and not isinstance(path, str)
        if not listed or not path or not all(type(rank) is int and rank >= 0 for rank in path):
            raise ValueError(f"a path of a static tree is a list of child ranks 0, 1, ..., got {path!r}")
        if tuple(path) in known:
            raise ValueError(f"the static tree lists the path {list(path)} twice")
        known.add(tuple(path))
    for path in sorted(known):
        if len(path) > 1 and path[:-1] not in known:
            raise ValueError(f"the static tree lists {list(path)}, but not its parent {list(path[:-1])}")
    return list(known)


def _levels(paths: list[RankPath], counts: Sequence[int]) -> list[Level]:
    inner = {path[:-1] for path in paths}
    by_depth = [[path for path in [(), *paths] if len(path) == depth] for depth in range(len(counts) + 1)]
    expanded = [[path for path in level if path in inner] for level in by_depth]  # of the last level nothing
    width = max(map(len, expanded[1:]))
    expanded[1:] = [level + level[:1] * (width - len(level)) for level in expanded[1:]]
    levels = []
    for depth, count in enumerate(counts, 1):
        above = {path: place for place, path in reversed(list(enumerate(expanded[depth - 1])))}
        places, here = {path: place for place, path in enumerate(by_depth[depth])}, expanded[depth]
        levels.append(
            Level(
                nodes=torch.tensor([above[path[:-1]] * count + path[-1] for path in by_depth[depth]]),
                inner=torch.tensor([places[path] for path in here]),
                parents=torch.tensor([above[path[:-1]] for path in here]),
                ancestors=_ancestors(expanded[1 : depth + 1]),
            )
        )
    return levels


def _ancestors(expanded: list[list[RankPath]]) -> Tensor:
    """Return the ancestors [1,W,l*W] of the nodes of level l among the expanded nodes of levels 1 to l.

    Each node of level l descends from one node of every level, and is its own ancestor even if it repeats another node.
    """
    *above, here = expanded
    places = [[*(level.index(path[:depth]) for depth, level in enumerate(above, 1)), w] for w, path in enumerate(here)]
    places_of = torch.tensor(places, dtype=torch.int64).view(len(here), len(expanded))
    return (places_of[..., None] == torch.arange(len(here))).flatten(1)[None]
