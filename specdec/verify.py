"""Verification: which drafted tokens are emitted."""

import torch
from torch import Tensor

from specdec.sampling import sample
from specdec.types import DraftTree, Sampling, Verdict


def sample_and_match(
    tree: DraftTree, logits: Tensor, sampling: Sampling, generator: torch.Generator | None = None
) -> Verdict:
    """Draw the target's token g at every node, and walk down from the root as long as a child carries the token drawn.

    Each emitted token is a draw from the target's own distribution given the tokens before it, so the output is
    distributed as the target's whatever was drafted. For trees of distinct siblings the accepted length has the same
    law as EAGLE's accept-or-renormalise walk: a node is left through one of its children with the children's total
    probability. logits [B,N,V]; the greedy and the sampled case are the same code.
    """
    drawn = sample(logits, sampling, generator)  # [B,N]
    hit = tree.tokens == drawn.gather(1, tree.parents)
    hit[:, 0] = True
    alive = (hit[:, None] | ~tree.ancestors).all(-1)  # every node on the way is a hit
    reached = torch.where(alive, tree.depth, -1)
    deepest, winner = reached.max(1)
    on_path = tree.ancestors.gather(1, winner[:, None, None].expand(-1, 1, hit.shape[1])).squeeze(1)
    path = _nodes_by_depth(on_path, tree.depth, tree.steps + 1)
    return Verdict(path=path, n=deepest + 1, tokens=drawn.gather(1, path))


def _nodes_by_depth(on_path: Tensor, depth: Tensor, slots: int) -> Tensor:
    """on_path [B,N] bool, one node per depth -> [B,slots] the nodes in order of depth, 0 after the last."""
    b, n = depth.shape
    nodes = torch.arange(n, device=depth.device).expand(b, n)
    path = torch.zeros(b, slots + 1, dtype=torch.int64, device=depth.device)
    return path.scatter_(1, torch.where(on_path, depth, slots), nodes)[:, :slots]
