"""What all rules share: nodes are hit or missed, the accepted path is the longest without a miss, a bonus ends it."""

import torch
from torch import Tensor

from specdec.types import DraftTree, Verdict


def alive(tree: DraftTree, hit: Tensor) -> Tensor:
    """hit [B,N], whatever it says of the root -> [B,N] bool: is every node on the way from the root a hit?"""
    hit = hit | (tree.depth == 0)
    return (hit[:, None] | ~tree.ancestors).all(-1)


def deepest(tree: DraftTree, hit: Tensor) -> Tensor:
    """hit [B,N] of which no two siblings are true -> [B] the node that the only path without a miss ends in."""
    return torch.where(alive(tree, hit), tree.depth, -1).max(1).indices


def accept(tree: DraftTree, winner: Tensor, bonus: Tensor) -> Verdict:
    """The path from the root to winner [B] is emitted, and then the token bonus [B]."""
    b, n = tree.depth.shape
    slots = tree.steps + 1
    on_path = tree.ancestors.gather(1, winner[:, None, None].expand(-1, 1, n)).squeeze(1)
    nodes = torch.arange(n, device=winner.device).expand(b, n)
    path = torch.zeros(b, slots + 1, dtype=torch.int64, device=winner.device)
    path = path.scatter_(1, torch.where(on_path, tree.depth, slots), nodes)[:, :slots]
    last = tree.depth.gather(1, winner[:, None])
    tokens = tree.tokens.gather(1, path).roll(-1, 1).scatter_(1, last, bonus[:, None])
    return Verdict(path=path, n=last.squeeze(1) + 1, tokens=tokens)


def at(nodes: Tensor, values: Tensor) -> Tensor:
    """values [B,N,V] of the nodes [B] -> [B,V]."""
    return values.gather(1, nodes[:, None, None].expand(-1, 1, values.shape[-1])).squeeze(1)


def of_parent(tree: DraftTree, probs: Tensor) -> Tensor:
    """probs [B,N,V] -> [B,N] what each node's parent gives to the node's token; void at the root."""
    return probs.flatten(1).gather(1, tree.parents * probs.shape[-1] + tree.tokens)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm(max(p - q, 0)) over the last dimension: what is left of p after q was offered and refused.

    No mass is left only if p equals q, when nothing is refused but by rounding: then p."""
    rest = (p - q).clamp_(min=0)
    mass = rest.sum(-1, keepdim=True)
    return torch.where(mass > 0, rest / mass, p)
