"""Grammars: masks of the target's logits at every node of a tree, along the node's own path.

Each library is one file, such as `specdec.sampling.json_grammar`, which makes a `Grammar`. The host knows the state of
a text in its grammar, so a round of a batch with such a text waits for its draft, and the mask of a node costs a
walk of the vocabulary on the host. A batch without one never waits.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Matcher(Protocol):
    """The state of one text in its grammar."""

    @property
    def over(self) -> bool:
        """Whether the text is whole: nothing but its end may follow."""

    def take(self, token: int) -> bool:
        """Advance by a token, if it may follow; else change nothing. Tokens that end a text are not taken."""

    def back(self) -> None:
        """Undo the last token that was taken."""

    def allowed(self) -> NDArray[np.uint8] | None:
        """Return the tokens that may follow, one bit each, the lowest of a byte first, at least V bits.

        Tokens that end a text are among them if it is whole. Returns None if the library has failed for this text;
        `take` then accepts no more tokens.
        """


class Grammar(Protocol):
    """The language of a text, for the tokens of one target."""

    ends: frozenset[int]  # the tokens that end a text

    def start(self) -> Matcher:
        """Return the state before the first token."""


Nodes = Sequence[Sequence[int]]  # [B][N], a number of each node of a tree


def masked(
    logits: Tensor, matchers: Sequence[Matcher | None], tokens: Nodes | None = None, parents: Nodes | None = None
) -> Tensor:
    """Return logits [B,N,V] with -inf for excluded tokens; rows without a matcher are unchanged.

    Row b's matcher has taken the row's text, the root's token included. Node i of the tree that has these tokens and
    parents is masked as the text and the path to i require; without a tree N is 1. Nodes below a token that may not
    follow are void and unchanged.
    """
    width, places, bits = logits.shape[1], [], []
    for row, matcher in enumerate(matchers):
        if matcher is not None:
            own = ([], [[]]) if tokens is None or parents is None else (tokens[row], _children(parents[row]))
            for node, allowed in _visit(matcher, *own):
                places.append(row * width + node)
                bits.append(allowed)
    if not places:
        return logits
    index = torch.tensor(places, device=logits.device)
    known = torch.from_numpy(np.stack(bits)).to(logits.device)
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    forbidden = ((known[..., None] >> shifts) & 1).flatten(1)[:, : logits.shape[-1]] == 0
    flat = logits.flatten(0, 1)
    return flat.index_copy(0, index, flat[index].masked_fill_(forbidden, -torch.inf)).view_as(logits)


def _children(parents: Sequence[int]) -> list[list[int]]:
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], 1):
        children[parent].append(node)
    return children


def _visit(
    matcher: Matcher, tokens: Sequence[int], children: list[list[int]], node: int = 0
) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Yield (node, allowed tokens) for this node and those below it. The matcher is restored."""
    allowed = matcher.allowed()
    if allowed is None:
        return
    yield node, allowed
    for child in children[node]:
        if matcher.take(tokens[child]):
            if not matcher.over:  # what a whole text is followed by is dropped
                yield from _visit(matcher, tokens, children, child)
            matcher.back()
