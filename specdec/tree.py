"""Tree algebra that policies, verifiers and drawings share."""

import torch
from torch import Tensor

from specdec.types import DraftTree


def ancestors_of(parents: Tensor, depth: int) -> Tensor:
    """parents [B,N] (root its own parent), no node deeper than `depth` -> ancestors [B,N,N] bool, self included.

    Pointer doubling: after k squarings every path of up to 2^k edges is closed.
    """
    n = parents.shape[1]
    reach = torch.eye(n, device=parents.device).expand(len(parents), n, n).scatter(2, parents[..., None], 1.0)
    for _ in range(max(depth - 1, 0).bit_length()):
        reach = (reach @ reach).clamp_(max=1.0)
    return reach > 0


def draw(tree: DraftTree, path: list[int], decode, row: int = 0) -> str:
    """An ASCII drawing of one tree: each node with its token text, its probability under the drafter, and a star if it
    was accepted. `path` holds the accepted nodes, `decode` maps a token id to text."""
    tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
    logq = None if tree.logq is None else tree.logq[row].tolist()
    children: dict[int, list[int]] = {}
    for node in range(1, len(tokens)):
        children.setdefault(parents[node], []).append(node)

    def label(node: int) -> str:
        share = "" if logq is None or node == 0 else f"  {torch.tensor(logq[node]).exp().item():.2f}"
        return f"{decode(tokens[node])!r}{share}{' *' if node in path else ''}"

    lines = [label(0)]

    def visit(node: int, indent: str) -> None:
        below = children.get(node, [])
        for i, child in enumerate(below):
            end = i == len(below) - 1
            lines.append(f"{indent}{'`-- ' if end else '|-- '}{label(child)}")
            visit(child, indent + ("    " if end else "|   "))

    visit(0, "")
    return "\n".join(lines)
