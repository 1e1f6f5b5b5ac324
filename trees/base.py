"""What all draft trees share. A tree is a value: it is read from a text, compared, printed, grown and replayed.

A subclass is a frozen dataclass whose fields are its settings. `conf/tree/NAME.yaml` names it, and its texts are found
by that.
"""

import re
from typing import Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from specdec.contracts import TreePolicy

WORDS = ("topk", "steps", "num_draft_tokens")
# The largest trees. A larger one is a mistake: its shape alone would fill the memory.
MOST_STEPS, MOST_TOPK, MOST_NODES = 256, 1024, 4096
MOST_CANDIDATES = 1 << 20  # nodes that a dynamic tree chooses from


class Tree(TreePolicy):
    """Hold the shape of a draft tree, in SGLang's terms.

    `steps` levels are drafted, a node has at most `topk` children, and the target verifies `num_draft_tokens` nodes,
    including the root. Some trees have these numbers as settings, others derive them.
    """

    device = torch.device("cpu")  # of the tensors that it holds
    fixed = False  # a static tree: every round has the same shape, and costs depend on it
    source = ""  # the name in conf/tree or the file that it was read from

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the tree that has this `text`; None if the text is of another kind of tree.

        Raises ValueError, one sentence, for a tree that cannot be.
        """
        raise NotImplementedError

    @property
    def text(self) -> str:
        """Return the text that `parse` reads this tree from."""
        return shape_of(self)

    def __str__(self) -> str:
        """Return the name or file that the tree was read from, or its text."""
        return self.source or self.text

    def entries(self) -> dict:
        """Return the entries of a settings file that ask for this tree."""
        return {word: getattr(self, word) for word in WORDS} if str(self) == shape_of(self) else {"tree": str(self)}

    def move(self, device: torch.device) -> None:
        """Bring its tensors to the device of the first root, once: a copy from the host would be a synchronisation."""
        if self.device != device:
            vars(self).update(tree_map_only(Tensor, lambda x: x.to(device), vars(self)), device=device)


def shape_of(tree) -> str:
    """topk/steps/num_draft_tokens, such as 4/5/16."""
    return f"{tree.topk}/{tree.steps}/{tree.num_draft_tokens}"


def shape_in(text: str, prefix: str = "") -> tuple[int, int, int] | None:
    """Return the three numbers of a text like 4/5/16 after the prefix; None if it is no such text."""
    found = re.fullmatch(rf"{prefix}(\d+)/(\d+)/(\d+)", text)
    return None if found is None else (int(found[1]), int(found[2]), int(found[3]))


def ancestors_of(parents: Tensor, depth: int) -> Tensor:
    """Return the ancestors bool [B,N,N] of each node, itself included, from parents [B,N]; the root is its own parent.

    No node may be deeper than `depth`. Pointer doubling: after k squarings every path of up to 2^k edges is closed.
    """
    n = parents.shape[1]
    reach = torch.eye(n, device=parents.device).expand(len(parents), n, n).scatter(2, parents[..., None], 1.0)
    for _ in range(max(depth - 1, 0).bit_length()):
        reach = (reach @ reach).clamp_(max=1.0)
    return reach > 0


def check_shape(topk: int, steps: int) -> None:
    """Raise ValueError if `topk` or `steps` is less than 1."""
    if topk < 1 or steps < 1:
        raise ValueError(f"topk and steps must be at least 1, got topk {topk} and steps {steps}")


def check_nodes(topk: int, steps: int, nodes: int, most: int) -> None:
    """most: nodes that a tree of this topk and steps has if nothing is left out."""
    if not 2 <= nodes <= most:
        raise ValueError(
            f"num_draft_tokens is {nodes}, but with topk {topk} and steps {steps} a tree holds 2 to {most} tokens, the "
            "root counted"
        )


def check_size(topk: int = 1, steps: int = 1, nodes: int = 1, candidates: int = 1) -> None:
    """Raise ValueError, with the bound, for a tree that is too large."""
    for name, size, most in (
        ("steps", steps, MOST_STEPS),
        ("topk", topk, MOST_TOPK),
        ("num_draft_tokens", nodes, MOST_NODES),
        ("the number of nodes that are drafted", candidates, MOST_CANDIDATES),
    ):
        if size > most:
            raise ValueError(f"{name} must be at most {most}, got {size}")


def check_chains(topk: int, steps: int, wanted: int | None, how: str = "") -> None:
    """Chains, drawn or not, have as many nodes as topk and steps say. how: how the tree is made."""
    nodes = topk * steps + 1
    shape = "a chain of steps + 1" if topk == 1 else f"{topk} chains of topk * steps + 1"
    if wanted not in (None, nodes):
        raise ValueError(f"with topk {topk} the tree{how} is {shape} = {nodes} tokens, not {wanted}")
