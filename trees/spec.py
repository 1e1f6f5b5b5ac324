"""How a tree is asked for: topk, steps and num_draft_tokens of flags and settings files, or a text.

    4/5/16          topk/steps/num_draft_tokens: a dynamic tree, or with topk 1 a chain
    block 8/7/32    the same of the best tree over a block of guesses
    drawn 3,1,1     children drawn from the drafter's distribution: so many of each node, level by level
    paths 0 1 0.0   a static tree by its paths of child ranks
    static          a name of conf/tree
    my/tree.yaml    a file with `paths` of child ranks: a static tree
    my.py:MyTree    a class or function of your own, called without arguments (`specdec.own`)

Each kind of tree reads and prints its own texts (`specdec.trees.base.Tree`).
"""

import itertools
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec import own, registry
from specdec.contracts import TreePolicy
from specdec.schema import check_value, named_arguments, shown, typed
from specdec.trees.base import WORDS, Tree, check_chains, check_shape, shape_of
from specdec.trees.dynamic import DynamicTree
from specdec.trees.static import Chain, SampledTree, StaticTree

TOPK, STEPS = DynamicTree.topk, DynamicTree.steps  # the defaults
AUTO = "auto"  # of `TreeSettings`: the tree that is fastest here


@named_arguments
def make_tree(
    topk: int | None = None,
    steps: int | None = None,
    num_draft_tokens: int | None = None,
    sample_draft: bool = False,
    tree: str | os.PathLike | None = None,
) -> Tree:
    """Return the draft tree of these settings, in SGLang's terms.

    Args:
        topk: Nodes expanded per level, and children per node (4). 1 is a chain of `steps` drafted tokens.
        steps: Levels (5).
        num_draft_tokens: Nodes that the target verifies, including the root (16).
        sample_draft: Draw the children: topk chains with different first tokens.
        tree: A whole tree instead, as for `parse_tree`.

    Raises:
        ValueError: There is no such tree, or settings contradict each other.
    """
    if tree is not None:
        if sample_draft or any(number is not None for number in (topk, steps, num_draft_tokens)):
            raise ValueError("topk, steps, num_draft_tokens and sample_draft contradict a whole tree")
        return parse_tree(tree)
    for name, number in {"topk": topk, "steps": steps, "num_draft_tokens": num_draft_tokens}.items():
        check_value(typed(int | None), number, name)
    topk, steps = TOPK if topk is None else topk, STEPS if steps is None else steps
    check_shape(topk, steps)
    if sample_draft:
        check_chains(topk, steps, num_draft_tokens, " drawn from the drafter")
        return SampledTree((topk, *[1] * (steps - 1)))
    if topk == 1:
        check_chains(topk, steps, num_draft_tokens)
        return Chain(steps)
    return DynamicTree(topk, steps, num_draft_tokens)


def tree_of_settings(settings: Mapping[str, Any]) -> Tree:
    """Return the tree of a command's settings: `draft_tree`, or else topk, steps and num_draft_tokens.

    A chain has steps + 1 nodes, whatever num_draft_tokens says, as that may be the default.
    """
    if settings["draft_tree"] is not None:
        return parse_tree(settings["draft_tree"])
    topk, steps, nodes = (settings[name] for name in WORDS)
    return make_tree(topk, steps, None if topk == 1 else nodes)


def parse_tree(text: str | os.PathLike) -> Tree:
    """Return the tree of a text.

    A text is "4/5/16", "paths 0 1 0.0", a name of conf/tree/, your own FILE.py:NAME, or a file with `paths`.

    Raises:
        ValueError: The text has none of these forms.
    """
    if not isinstance(text, str | os.PathLike):
        raise ValueError(f"a tree must be a text such as 4/5/16, or a file, got {shown(text)}")
    text, known = str(text), registry.names("tree")
    if text in known:
        return _read_from(text, registry.make("tree", text))
    for kind in {registry.target("tree", name): None for name in known}:
        if (tree := kind.parse(text)) is not None:
            return tree
    if (part := own.find("tree", text)) is not None:
        return _read_from(text, checked(text, own.make(text, part, Tree)))
    if not re.fullmatch(r"\w+", text) or Path(text).is_file():
        return _read_from(str(Path(text).resolve()), load_tree(text))
    raise ValueError(f"there is no tree {text!r}; known are {', '.join(known)}, or give a file with `paths`")


def _read_from(source: str, tree: Tree) -> Tree:
    vars(tree)["source"] = source
    return tree


def checked(text: str, tree: Tree) -> Tree:
    """Return a tree. Raises ValueError if a setting or a method of the user's own code is missing or wrong.

    `text` is the name that the user gave. What the tree grows is checked by `specdec.engine.own_parts`.
    """
    if not own.name_of(tree):
        return tree
    for name in WORDS:
        number = getattr(tree, name, None)
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValueError(f"{text}: {name} must be a whole number of at least 1, got {shown(number)}")
    for name in ("grow", "smaller", "draft_slots"):
        if getattr(type(tree), name, None) in (None, getattr(Tree, name, None)):
            raise ValueError(f"{text}: the tree has no method {name}, see specdec.contracts.TreePolicy")
    return tree


def grid(
    topk: int | Iterable[int], steps: int | Iterable[int], num_draft_tokens: int | Iterable[int], block: bool = False
) -> list[str]:
    """Return the texts of all combinations, in order and without duplicates, including trees that cannot be built.

    A chain (topk 1) has steps + 1 nodes, for any num_draft_tokens. block: make block trees of all others. Raises
    ValueError unless all numbers are positive whole numbers.
    """
    axes = [_numbers(name, axis) for name, axis in zip(WORDS, (topk, steps, num_draft_tokens), strict=True)]
    kind = "block " if block else ""
    texts = (f"1/{d}/{d + 1}" if k == 1 else f"{kind}{k}/{d}/{n}" for k, d, n in itertools.product(*axes))
    return list(dict.fromkeys(texts))


@dataclass(frozen=True)
class TreeSettings:
    """A tree as command lines and settings files name it. Fields that are None are left out."""

    steps: int | None = None
    topk: int | None = None
    num_draft_tokens: int | None = None
    sample_draft: bool = False
    children: str | None = None
    tree: str | None = None

    @property
    def automatic(self) -> bool:
        """The tree is to be chosen: `auto` was asked for, or nothing was."""
        return self.tree == AUTO or self == TreeSettings(children=self.children)

    def make(self) -> Tree:
        """Return the tree that these settings name, or the default if it is to be chosen later."""
        if self.automatic:
            return DynamicTree()
        return make_tree(self.topk, self.steps, self.num_draft_tokens, self.sample_draft, self.tree)


def describe(tree: TreePolicy) -> str:
    """A policy as a user names it, and its shape: 'dynamic 4/5/16'. The name is the first in conf/tree of its class."""
    kinds = ((name, registry.target("tree", name)) for name in registry.names("tree"))
    return f"{next((name for name, kind in kinds if kind is type(tree)), type(tree).__name__)} {shape_of(tree)}"


def load_tree(file: str | os.PathLike) -> StaticTree:
    """The static tree of a YAML or JSON file with a list `paths`, such as specdec/lab/tune_tree.py writes.

    Raises ValueError, one sentence, for anything else.
    """
    content = registry.read_yaml(file, "tree")
    paths = content.pop("paths", None) if isinstance(content, dict) else None
    if not isinstance(paths, list):
        raise ValueError(
            f"{file} holds no static tree: it has no list `paths`. `specdec tune tree` writes one; a dynamic tree is "
            "given as topk/steps/num_draft_tokens, such as 4/5/16"
        )
    kind = content.pop("_target_", StaticTree.__name__)
    if not isinstance(kind, str) or kind.rpartition(".")[2] != StaticTree.__name__ or content:
        what = next(iter(content), f"_target_: {kind}")
        raise ValueError(f"{file} holds no static tree: in addition to `paths` it has {what}")
    try:
        return StaticTree(paths)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def _numbers(name: str, axis: int | Iterable[int]) -> list[int]:
    values = list(axis) if isinstance(axis, Iterable) and not isinstance(axis, str) else [axis]
    bad = [v for v in values if not isinstance(v, int) or isinstance(v, bool) or v < 1]
    if bad or not values:
        raise ValueError(f"{name} must be a positive whole number or a list of such, got {bad[0] if bad else '[]'}")
    return values
