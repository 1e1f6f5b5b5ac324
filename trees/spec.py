"""A draft tree as a value: the one place where topk, steps and num_draft_tokens are read, checked and printed.

The command line, settings files, sweeps, tune, replay and compare hold a `TreeSpec`, and `build` makes the policy that
grows the tree. Its texts are

    4/5/16          topk/steps/num_draft_tokens: a dynamic tree, or with topk 1 a chain
    block 8/7/32    the same of the best tree over a block of guesses
    drawn 3,1,1     children drawn from the drafter's distribution: so many of each node, level by level
    static          a name of conf/tree
    my/tree.yaml    a file with `paths` of child ranks: a static tree
    paths 0 1 0.0   the same paths, written out
"""

import itertools
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdec import registry
from specdec.children import KINDS
from specdec.contracts import TreePolicy
from specdec.trees.block import MANY, BlockTree, most_nodes
from specdec.trees.bounds import check_shape
from specdec.trees.chain import Chain
from specdec.trees.dynamic import DynamicTree
from specdec.trees.sampled import SampledTree
from specdec.trees.static import StaticTree

TOPK, STEPS, NODES = 4, 5, 16  # where nothing else is said
WORDS = ("topk", "steps", "num_draft_tokens")
BLOCK, DRAWN, PATHS = "block ", "drawn ", "paths "
AUTO = "auto"  # of `TreeSettings`: the tree that is fastest here


@dataclass(frozen=True, order=True)
class TreeSpec:
    """A tree in SGLang's words. `steps` levels are drafted, a node has at most `topk` children, and the target verifies
    `num_draft_tokens` nodes, the root counted; None stands for the steps + 1 nodes of a chain, and for 16, or as many
    as there are, of a dynamic tree.

    With `expansion`, `file` or `paths`, whose shape the three then are, use `of` or `parse`. A spec need not be
    buildable: a sweep crosses all values, and `build` refuses what cannot be.
    """

    topk: int = TOPK
    steps: int = STEPS
    num_draft_tokens: int | None = None  # a number from here on
    file: str | None = None  # a name of conf/tree, or a file with `paths`
    expansion: tuple[int, ...] = ()  # of a drawn tree: children of each node, level by level
    paths: tuple[tuple[int, ...], ...] = ()  # of a static tree without a file
    block: bool = False  # it is the best tree over a block (`specdec.trees.BlockTree`)

    def __post_init__(self) -> None:
        check_shape(self.topk, self.steps)
        if self.num_draft_tokens is None:
            nodes = self.steps + 1 if self.topk == 1 else min(NODES, self.most_nodes)
            object.__setattr__(self, "num_draft_tokens", nodes)

    # Reading

    @classmethod
    def of(
        cls,
        topk: int | None = None,
        steps: int | None = None,
        num_draft_tokens: int | None = None,
        sample_draft: bool = False,
        tree: str | os.PathLike | None = None,
    ) -> "TreeSpec":
        """A spec from settings, each of which may be left out. `tree` is a whole tree, as `parse` reads it.

        With `sample_draft` the children are drawn: topk chains from different first tokens, topk * steps + 1 nodes.
        Raises ValueError for settings that contradict each other."""
        if tree is not None:
            if sample_draft or any(number is not None for number in (topk, steps, num_draft_tokens)):
                raise ValueError("topk, steps, num_draft_tokens and sample_draft contradict a whole tree")
            return cls.parse(tree)
        shape = TOPK if topk is None else topk, STEPS if steps is None else steps
        if not sample_draft:
            return cls(*shape, num_draft_tokens)
        cls(*shape)._check_nodes(num_draft_tokens, " drawn from the drafter")
        return cls.drawn((shape[0], *[1] * (shape[1] - 1)))

    @classmethod
    def drawn(cls, expansion: Iterable[int]) -> "TreeSpec":
        """Children drawn from the drafter, so many of each node, level by level (`specdec.trees.SampledTree`)."""
        policy = SampledTree(tuple(expansion))
        return cls(policy.topk, policy.steps, policy.num_draft_tokens, None, policy.expansion)

    @classmethod
    def static(cls, paths: Iterable[Iterable[int]]) -> "TreeSpec":
        """The tree of these paths of child ranks (`specdec.trees.StaticTree`); a chain, if it is one."""
        paths = tuple(sorted((tuple(path) for path in paths), key=lambda path: (len(path), path)))
        policy = StaticTree(paths)
        if policy.num_draft_tokens == policy.steps + 1 and policy.topk == 1:
            return cls(1, policy.steps)
        return cls(policy.topk, policy.steps, policy.num_draft_tokens, None, (), paths)

    @classmethod
    def of_settings(cls, settings: Mapping[str, int | None]) -> "TreeSpec":
        """The spec of topk, steps and num_draft_tokens among a command's settings. A chain has steps + 1 nodes,
        whatever num_draft_tokens says, as that may be the default."""
        topk, steps, nodes = (settings[name] for name in WORDS)
        return cls.of(topk, steps, None if topk == 1 else nodes)

    @classmethod
    def parse(cls, text: str | os.PathLike) -> "TreeSpec":
        """The spec of a text of one of the forms above. Raises ValueError, one sentence, for anything else."""
        text = str(text)
        if shape := re.fullmatch(rf"({BLOCK})?(\d+)/(\d+)/(\d+)", text):
            block, *numbers = shape.groups()
            return cls(*map(int, numbers), block=block is not None)
        if re.fullmatch(rf"{DRAWN}\d+(,\d+)*", text):
            return cls.drawn(map(int, text.removeprefix(DRAWN).split(",")))
        if re.fullmatch(rf"{PATHS}\d+(\.\d+)*( \d+(\.\d+)*)*", text):
            return cls.static(map(int, path.split(".")) for path in text.removeprefix(PATHS).split(" "))
        policy = _from_conf_or_file(text)
        return cls(policy.topk, policy.steps, policy.num_draft_tokens, text)

    @classmethod
    def grid(
        cls,
        topk: int | Iterable[int],
        steps: int | Iterable[int],
        num_draft_tokens: int | Iterable[int],
        block: bool = False,
    ) -> "list[TreeSpec]":
        """Every combination, in order and once, with those that cannot be built. A chain (topk 1) has steps + 1 nodes,
        whatever num_draft_tokens says. block: other trees are those over a block. Raises ValueError for what is no
        positive whole number."""
        axes = [_numbers(name, axis) for name, axis in zip(WORDS, (topk, steps, num_draft_tokens), strict=True)]
        combined = itertools.product(*axes)
        specs = [cls(k, d, None if k == 1 else n, block=block and k > 1) for k, d, n in combined]
        return list(dict.fromkeys(specs))

    # Making

    def build(self) -> TreePolicy:
        """The policy that grows this tree. Raises ValueError, one sentence, if there is no such tree."""
        if self.file is not None:
            return _from_conf_or_file(self.file)
        if self.expansion:
            return SampledTree(self.expansion)
        if self.paths:
            return StaticTree(self.paths)
        if self.block:
            return BlockTree(self.topk, self.steps, self.num_draft_tokens)
        if self.topk == 1:
            self._check_nodes(self.num_draft_tokens)
            return Chain(self.steps)
        return DynamicTree(self.topk, self.steps, self.num_draft_tokens)

    @property
    def fixed(self) -> bool:
        """It is a static tree: every round has the same shape, and costs depend on it."""
        return self.file is not None or bool(self.paths)

    @property
    def most_nodes(self) -> int:
        """The nodes of the largest dynamic tree of this topk and steps, the root counted, or of one over a block, if
        those are not more than `MANY`."""
        if self.block:
            return most_nodes(self.topk, self.steps, MANY)
        return DynamicTree.candidates(self.topk, self.steps) + 1

    @property
    def path(self) -> Path | None:
        """Where the file of this tree is, that of a name in conf/tree too; None for a tree without a file."""
        if self.file is None:
            return None
        named = self.file in registry.names("tree")
        return registry.CONF / "tree" / f"{self.file}.yaml" if named else Path(self.file)

    def _check_nodes(self, wanted: int | None, how: str = "") -> None:
        """Chains, drawn or not, have as many nodes as topk and steps say."""
        nodes = self.topk * self.steps + 1
        shape = "a chain of steps + 1" if self.topk == 1 else f"{self.topk} chains of topk * steps + 1"
        if wanted not in (None, nodes):
            raise ValueError(f"with topk {self.topk} the tree{how} is {shape} = {nodes} tokens, not {wanted}")

    # Printing

    def __str__(self) -> str:
        if self.expansion:
            return DRAWN + ",".join(map(str, self.expansion))
        if self.paths:
            return PATHS + " ".join(".".join(map(str, path)) for path in self.paths)
        return self.file or (BLOCK if self.block else "") + shape_of(self)

    def entries(self) -> dict:
        """The entries of a settings file that say so; a tree file by its absolute path."""
        if self.expansion or self.paths or self.block:
            return {"tree": str(self)}
        if self.file is not None:
            return {"tree": self.file if self.file in registry.names("tree") else str(Path(self.file).resolve())}
        return {word: getattr(self, word) for word in WORDS}


def _option(text: str, default: object = None, **flag) -> Any:
    return field(default=default, metadata={"help": text} | flag)


@dataclass(frozen=True)
class TreeSettings:
    """A tree as command lines and settings files name it: what is None is left out."""

    steps: int | None = _option(f"levels (default {STEPS})")
    topk: int | None = _option(f"nodes expanded on a level, children of each (default {TOPK}); 1: a chain")
    num_draft_tokens: int | None = _option(f"nodes that the target verifies, the root counted (default {NODES})")
    sample_draft: bool = _option("topk chains of steps tokens, whose tokens can be drawn from the drafter", False)
    children: str | None = _option(
        "above temperature 0: likeliest, coupled or drawn (default: by the rule)", choices=KINDS, metavar="KIND"
    )
    tree: str | None = _option(
        f"instead: auto (default), the fastest; as 1/3/4; {', '.join(registry.names('tree'))}; a file with `paths`",
        metavar="TREE",
    )

    @property
    def automatic(self) -> bool:
        """The tree is to be chosen: `auto` was asked for, or nothing was."""
        return self.tree == AUTO or self == TreeSettings(children=self.children)

    def spec(self) -> TreeSpec:
        """What was asked for; where it is to be chosen, the default. Raises ValueError, one sentence, for settings that
        contradict each other, and for no tree."""
        if self.automatic:
            return TreeSpec()
        return TreeSpec.of(self.topk, self.steps, self.num_draft_tokens, self.sample_draft, self.tree)


def shape_of(tree: TreePolicy | TreeSpec) -> str:
    """topk/steps/num_draft_tokens, such as 4/5/16."""
    return f"{tree.topk}/{tree.steps}/{tree.num_draft_tokens}"


def describe(tree: TreePolicy) -> str:
    """A policy as a user names it, and its shape: 'dynamic 4/5/16'. The name is the first in conf/tree of its class."""
    kinds = ((name, registry.target("tree", name)) for name in registry.names("tree"))
    return f"{next((name for name, kind in kinds if kind is type(tree)), type(tree).__name__)} {shape_of(tree)}"


def load_tree(file: str | os.PathLike) -> StaticTree:
    """The static tree of a YAML or JSON file with a list `paths`, such as specdec/lab/replay/optimal_tree.py writes.

    Raises ValueError, one sentence, for anything else."""
    content = registry.read_yaml(file, "tree")
    paths = content.pop("paths", None) if isinstance(content, dict) else None
    if not isinstance(paths, list):
        raise ValueError(
            f"{file} holds no static tree: it has no list `paths`. `specdec tree` writes one; a dynamic tree is "
            "given as topk/steps/num_draft_tokens, such as 4/5/16"
        )
    kind = content.pop("_target_", StaticTree.__name__)
    if not isinstance(kind, str) or kind.rpartition(".")[2] != StaticTree.__name__ or content:
        what = next(iter(content), f"_target_: {kind}")
        raise ValueError(f"{file} holds no static tree: beside `paths` it says {what}")
    try:
        return StaticTree(paths)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def _from_conf_or_file(text: str) -> TreePolicy:
    known = registry.names("tree")
    if text in known:
        return registry.make("tree", text)
    if not re.fullmatch(r"\w+", text) or Path(text).is_file():
        return load_tree(text)
    raise ValueError(f"there is no tree {text!r}; known are {', '.join(known)}, or give a file with `paths`")


def _numbers(name: str, axis: int | Iterable[int]) -> list[int]:
    values = list(axis) if isinstance(axis, Iterable) and not isinstance(axis, str) else [axis]
    bad = [v for v in values if not isinstance(v, int) or isinstance(v, bool) or v < 1]
    if bad or not values:
        raise ValueError(f"{name} must be a positive whole number or a list of such, got {bad[0] if bad else '[]'}")
    return values
