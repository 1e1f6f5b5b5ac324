"""Checks of a tree that the user wrote: a wrong one would change the text, or end in an error deep in the engine."""

import torch
from torch import Tensor

from specdec import own
from specdec.children import LIKELIEST
from specdec.contracts import Children, Drafter, DraftState
from specdec.schema import shown
from specdec.structs import DraftTree
from specdec.trees.base import WORDS, Tree, ancestors_of


def checked(text: str, tree: Tree) -> Tree:
    """Return a tree of the user's own code. Its settings are checked now, and the first tree that it grows, then.

    Args:
        text: The name that the user gave, for errors.
        tree: What the user's code made. Trees of specdec are returned as they are.

    Raises:
        ValueError: A setting or a method is missing or wrong.
    """
    if type(tree).__module__.startswith("specdec."):
        return tree
    for name in WORDS:
        number = getattr(tree, name, None)
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValueError(f"{text}: {name} must be a whole number of at least 1, got {shown(number)}")
    for name in ("grow", "smaller", "draft_slots"):
        if getattr(type(tree), name, None) in (None, getattr(Tree, name, None)):
            raise ValueError(f"{text}: the tree has no method {name}, see specdec.contracts.TreePolicy")

    def grow(drafter: Drafter, root: Tensor, state: DraftState, children: Children = LIKELIEST) -> DraftTree:
        del vars(tree)["grow"]
        with own.blamed(text, "growing a tree"):
            grown = tree.grow(drafter, root, state, children)
            check_grown(tree, grown, root)
        return grown

    vars(tree)["grow"] = grow
    return tree


def check_grown(tree: Tree, grown: DraftTree, root: Tensor) -> None:
    """Raise ValueError if the tensors of a tree contradict each other or the settings of its policy."""
    b, n = len(root), tree.num_draft_tokens
    for name, shape in {"tokens": (b, n), "parents": (b, n), "depth": (b, n), "ancestors": (b, n, n)}.items():
        if tuple(getattr(grown, name).shape) != shape:
            raise ValueError(f"{name} has the shape {list(getattr(grown, name).shape)}, and must have {list(shape)}")
    if not torch.equal(grown.tokens[:, 0], root):
        raise ValueError("node 0 must carry the root token")
    parents, place = grown.parents, torch.arange(n, device=root.device)
    if (parents[:, 0] != 0).any() or (parents[:, 1:] >= place[1:]).any() or (parents < 0).any():
        raise ValueError("a parent must stand before its children, and the root is its own parent")
    if grown.steps > tree.steps or (grown.depth > grown.steps).any():
        raise ValueError(f"a node is deeper than steps, which is {tree.steps}")
    if (grown.depth[:, 0] != 0).any() or (grown.depth[:, 1:] != grown.depth.gather(1, parents)[:, 1:] + 1).any():
        raise ValueError("the depth of a node must be one more than that of its parent, and that of the root 0")
    if not torch.equal(grown.ancestors, ancestors_of(parents, n)):
        raise ValueError("ancestors must be the nodes on the path from the root to each node, itself included")
    siblings = (parents[:, :, None] == parents[:, None]) & (grown.tokens[:, :, None] == grown.tokens[:, None])
    if siblings[:, 1:, 1:].triu(1).any():
        raise ValueError("two children of a node carry the same token")
