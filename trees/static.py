"""Static trees: one shape for every round, given as paths of child ranks."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.children import LIKELIEST
from specdec.contracts import Children, Drafter, DraftState
from specdec.structs import DraftTree
from specdec.trees.bounds import check_size

RankPath = tuple[int, ...]


class Level(NamedTuple):
    """One level of the tree; its W expanded nodes are, if fewer have children, the first of them again and again."""

    nodes: Tensor  # [n] where the level's nodes stand among the W * topk children of the level above
    inner: Tensor  # [W] which of the nodes are expanded
    parents: Tensor  # [W] where their parents stand among the expanded nodes of the level above
    ancestors: Tensor  # [1, W, level * W] bool, as `Drafter.step` wants them


class StaticTree:
    """The nodes named by `paths` in Medusa's form (arXiv 2401.10774): [0, 2] is the third most likely child of the most
    likely child of the root, which is not listed. Every path without its last rank must be listed too.

    Only nodes with children are expanded: on every level W, as many as the level with the most of them has.
    """

    samples = False
    marginals = False

    def __init__(self, paths: Sequence[Sequence[int]]):
        nodes = [(), *sorted(_checked(paths), key=lambda path: (len(path), path))]  # breadth first
        self.paths = nodes[1:]
        self.num_draft_tokens, self.steps = len(nodes), len(nodes[-1])
        self.topk = 1 + max(path[-1] for path in nodes[1:])
        check_size(self.topk, self.steps, self.num_draft_tokens)
        self.levels = _levels(nodes, self.steps, self.topk)
        self.width = len(self.levels[0].inner)
        self.parents = torch.tensor([nodes.index(path[:-1]) for path in nodes])
        self.depth = torch.tensor([len(path) for path in nodes])
        self.visible = torch.tensor([[a == b[: len(a)] for a in nodes] for b in nodes])

    def shallower(self, steps: int) -> "StaticTree":
        return StaticTree([path for path in self.paths if len(path) <= steps])

    def smaller(self, steps: int) -> "StaticTree":
        return self.shallower(steps)

    def draft_slots(self) -> int:
        return self.width * (self.steps - 1)

    def grow(self, drafter: Drafter, root: Tensor, state: DraftState, children: Children = LIKELIEST) -> DraftTree:
        self._move(root.device)
        b, n = len(root), self.num_draft_tokens
        tokens, scores = [root[:, None]], [torch.zeros(b, 1, device=root.device)]
        first, state = state, drafter.root(state)
        expanded = scores[0]  # [B,W] path scores of the nodes that are expanded
        for depth, level in enumerate(self.levels, 1):
            gains, draft_ids = children.best(state, drafter.vocab, depth - 1, self.topk)
            scores.append((expanded[..., None] + gains).flatten(1).index_select(1, level.nodes))
            tokens.append(drafter.vocab.to_target(draft_ids.flatten(1).index_select(1, level.nodes)))
            if depth < self.steps:
                expanded = scores[-1].index_select(1, level.inner)
                hidden = state.hidden.index_select(1, level.parents)
                ancestors = level.ancestors.expand(b, -1, -1)
                inner = tokens[-1].index_select(1, level.inner)
                state = drafter.expand(first, inner, hidden, depth, ancestors)
        return DraftTree(
            tokens=torch.cat(tokens, 1),
            parents=self.parents.expand(b, n),
            depth=self.depth.expand(b, n),
            ancestors=self.visible.expand(b, n, n),
            steps=self.steps,
            logq=torch.cat(scores, 1),
        )

    def _move(self, device: torch.device) -> None:
        """Bring the shape to the device of the first root, once: a copy from the host would be a synchronisation."""
        if self.parents.device != device:
            self.levels = [Level(*(part.to(device) for part in level)) for level in self.levels]
            self.parents, self.depth, self.visible = (x.to(device) for x in (self.parents, self.depth, self.visible))


def _checked(paths: Sequence[Sequence[int]]) -> list[RankPath]:
    """The paths, as tuples; ValueError unless they make a tree."""
    if not paths:
        raise ValueError("a static tree needs paths, such as [[0], [1], [0, 0]]")
    known: set[RankPath] = set()
    for path in paths:
        if (
            not isinstance(path, Sequence)
            or isinstance(path, str)
            or not path
            or not all(type(rank) is int and rank >= 0 for rank in path)
        ):
            raise ValueError(f"a path of a static tree is a list of child ranks 0, 1, ..., got {path!r}")
        if tuple(path) in known:
            raise ValueError(f"the static tree lists the path {list(path)} twice")
        known.add(tuple(path))
    for path in sorted(known):
        if len(path) > 1 and path[:-1] not in known:
            raise ValueError(f"the static tree lists {list(path)}, but not its parent {list(path[:-1])}")
    return list(known)


def _levels(nodes: list[RankPath], steps: int, topk: int) -> list[Level]:
    inner = {path[:-1] for path in nodes[1:]}
    by_depth = [[path for path in nodes if len(path) == depth] for depth in range(steps + 1)]
    expanded = [[path for path in level if path in inner] for level in by_depth[:-1]]
    width = max((len(level) for level in expanded[1:]), default=1)
    expanded = [expanded[0], *(level + level[:1] * (width - len(level)) for level in expanded[1:]), [()] * width]
    levels = []
    for depth in range(1, steps + 1):
        above, here = expanded[depth - 1], expanded[depth]
        last = depth == steps  # of which nothing is expanded
        levels.append(
            Level(
                nodes=torch.tensor([above.index(path[:-1]) * topk + path[-1] for path in by_depth[depth]]),
                inner=torch.tensor([0 if last else by_depth[depth].index(path) for path in here]),
                parents=torch.tensor([0 if last else above.index(path[:-1]) for path in here]),
                ancestors=torch.zeros(1, width, 0).bool() if last else _ancestors(expanded[1 : depth + 1]),
            )
        )
    return levels


def _ancestors(expanded: list[list[RankPath]]) -> Tensor:
    """Expanded paths of levels 1..l -> [1, W, l*W]: each node of level l descends from one of every level, and is its
    own even where it stands for another."""
    *above, here = expanded
    rows = []
    for place, path in enumerate(here):
        line = [level.index(path[: depth + 1]) for depth, level in enumerate(above)] + [place]
        rows.append([at == own for level, own in zip(expanded, line, strict=True) for at in range(len(level))])
    return torch.tensor(rows)[None]
