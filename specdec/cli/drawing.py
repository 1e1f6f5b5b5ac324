"""Draft trees as text."""

import torch

from specdec.structs import DraftTree


def draw(tree: DraftTree, path: list[int], decode, row: int = 0) -> str:
    """An ASCII drawing of the tree of one row.

    A node shows its token's text, the probability of its path under the drafter, and a star if it was accepted.
    path: the accepted nodes. decode: maps a token id to text.
    """
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
