"""Settings of trees."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from specdec.api import load_tree, make_tree
from specdec.contracts import TreePolicy


@dataclass(frozen=True, order=True)
class Setting:
    """A dynamic tree, or with topk 1 a chain, in SGLang's words; or a file's static tree, whose shape these are."""

    topk: int
    steps: int
    num_draft_tokens: int
    file: str | None = None

    def tree(self) -> TreePolicy:
        return load_tree(self.file) if self.file else make_tree(self.topk, self.steps, self.num_draft_tokens)

    def __str__(self) -> str:
        return self.file or f"{self.topk}/{self.steps}/{self.num_draft_tokens}"


def static(file: str | os.PathLike) -> Setting:
    """The setting of a tree file. ValueError, one sentence, if it holds none."""
    tree = load_tree(file)
    return Setting(tree.topk, tree.steps, tree.num_draft_tokens, str(file))


def grid(topks: Sequence[int], steps: int, nodes: Sequence[int]) -> list[Setting]:
    """Every setting that there is with these topks, 1 to `steps` levels, and these numbers of nodes."""
    settings = []
    for topk in sorted(set(topks)):
        for depth in range(1, steps + 1):
            if topk == 1:
                settings.append(Setting(1, depth, depth + 1))
                continue
            most = topk + (depth - 1) * topk * topk + 1
            # With fewer nodes than levels + 1 the deepest levels are drafted in vain.
            settings += [Setting(topk, depth, n) for n in sorted(set(nodes)) if depth + 1 <= n <= most]
    return settings
