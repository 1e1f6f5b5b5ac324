"""Multi-round rejection: for children that were drawn from the drafter's distribution."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.sampling.filters import filtered_probs
from specdec.sampling.noise import RoundNoise
from specdec.structs import DraftTree, Sampling, SamplingBatch, Verdict
from specdec.verify.walk import Rule, accept, at, bonus_of, coins_of, deepest, residual


@dataclass(frozen=True)
class MultiRoundRejection(Rule):
    """Offer a node's children in the order in which they were drawn from the drafter's distribution q.

    Child x is accepted with probability min(1, p(x)/q(x)). If it is rejected, p <- norm(max(p - q, 0)), q loses x and
    is renormalised, and the next child is offered. If no child is accepted, the bonus is drawn from the remaining p.

    SpecInfer (arXiv 2305.09781), Sequoia (arXiv 2402.12374) and EAGLE-1; on a chain Leviathan's rule (arXiv
    2211.17192). A child to which q gives nothing, because q had fewer tokens than children were wanted, was certain:
    its q is one at x. All children of a greedy tree but the first are such, so temperature 0 is greedy matching.
    """

    needs_q = True

    def __call__(
        self, tree: DraftTree, logits: Tensor, sampling: Sampling | SamplingBatch, noise: RoundNoise | None = None
    ) -> Verdict:
        """Verify a tree with `DraftTree.q`: see `structs.Verifier`."""
        p, (q, _) = filtered_probs(logits, sampling), tree.drawn_from()
        children = children_by_rank(tree)
        coins = coins_of(tree, noise).gather(1, children.flatten(1)).view(children.shape)
        hit = torch.zeros_like(tree.tokens, dtype=torch.bool)
        undecided = torch.ones_like(hit)
        for child, coin in zip(children.unbind(-1), coins.unbind(-1), strict=True):
            exists = child > 0
            token = tree.tokens.gather(1, child)[..., None]
            q = torch.where(q.gather(-1, token) > 0, q, torch.zeros_like(q).scatter_(-1, token, 1.0))
            accepted = coin * q.gather(-1, token).squeeze(-1) < p.gather(-1, token).squeeze(-1)
            hit.scatter_(1, child, accepted & exists & undecided)  # where there is no child: to the root, which is void
            undecided = undecided & ~(accepted & exists)
            p = torch.where(exists[..., None], residual(p, q), p)
            q = _without(q, token)
        winner = deepest(tree, hit)
        return accept(tree, winner, bonus_of(tree, winner, at(winner, p), noise))


def children_by_rank(tree: DraftTree) -> Tensor:
    """Return [B,N,K], the children of each node in order of index, K = tree.topk, padded with 0 (no node's child)."""
    (b, n), (_, topk) = tree.parents.shape, tree.drawn_from()
    nodes = torch.arange(n, device=tree.parents.device).expand(b, n)
    siblings = (tree.parents[:, :, None] == tree.parents[:, None]) & (nodes[:, None] > 0)
    rank = siblings.tril(-1).sum(-1)
    place = (tree.parents * topk + rank)[:, 1:]
    empty = torch.zeros(b, n * topk, dtype=torch.int64, device=place.device)
    return empty.scatter_(1, place, nodes[:, 1:]).view(b, n, topk)


def _without(q: Tensor, token: Tensor) -> Tensor:
    """Return q [..., V] without token [..., 1], renormalised; zeros if it had no other token."""
    rest = q.scatter(-1, token, 0.0)
    return rest / rest.sum(-1, keepdim=True).clamp_(min=torch.finfo(q.dtype).tiny)
