"""The rules other than the default: for drawn children, with thresholds, and lossy ones."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from specdec.sampling.noise import RoundNoise
from specdec.schema import check_fields, ranged
from specdec.structs import DraftTree
from specdec.verify.walk import ChoosingRule, alive, at, coins_of, deepest, of_parent, residual


@dataclass(frozen=True)
class BlockVerification(ChoosingRule):
    """Accept the tokens of a chain together, by algorithm 2 of Sun et al. (arXiv 2403.10444).

    Along the chain x_1..x_D, with r_0 = 1:

        r_i = min(1, r_{i-1} p(x_i)/q(x_i))          left_i = sum_x max(r_i p(x | x_1..x_i) - q(x | x_1..x_i), 0)
        h_i = left_i / (left_i + 1 - r_i) for i < D  h_D = r_D

    Each i is a success with probability h_i. The chain is accepted up to the last success, and the bonus is drawn from
    norm(max(r_i p - q, 0)) there, from p at the end. At least i tokens are accepted with probability r_i: no lossless
    rule accepts more of a chain on average, and token by token it would be the product of min(1, p/q).
    """

    needs_q = True
    chains_only = True

    @override
    def choose(self, tree: DraftTree, p: Tensor, noise: RoundNoise | None) -> tuple[Tensor, Tensor]:
        q, _ = tree.drawn_from()  # node i of a chain is x_i
        ratios = of_parent(tree, p)[:, 1:] / of_parent(tree, q)[:, 1:]
        reached = [torch.ones_like(ratios[:, 0])]
        for ratio in ratios.unbind(1):
            reached.append((reached[-1] * ratio).clamp(max=1))
        reach = torch.stack(reached, 1)  # [B,N] r
        scaled = reach[..., None] * p
        left = (scaled - q).clamp_(min=0).sum(-1)
        # Both terms vanish where p equals q, and then a later token is accepted for certain.
        h = torch.where(left + (1 - reach) > 0, left / (left + (1 - reach)), 1.0)
        h = torch.cat([h[:, :-1], reach[:, -1:]], 1)
        success = coins_of(tree, noise) < h
        success = F.pad(success[:, 1:], (1, 0), value=True)
        winner = torch.where(success, tree.depth, -1).max(1).indices
        at_end = (winner == tree.steps)[:, None]
        return winner, torch.where(at_end, at(winner, p), residual(at(winner, scaled), at(winner, q)))


@dataclass(frozen=True)
class MultiRoundRejection(ChoosingRule):
    """Offer a node's children in the order in which they were drawn from the drafter's distribution q.

    Child x is accepted with probability min(1, p(x)/q(x)). If it is rejected, p <- norm(max(p - q, 0)), q loses x and
    is renormalised, and the next child is offered. If no child is accepted, the bonus is drawn from the remaining p.

    SpecInfer (arXiv 2305.09781), Sequoia (arXiv 2402.12374) and EAGLE-1; on a chain Leviathan's rule (arXiv
    2211.17192). A child to which q gives nothing, because q had fewer tokens than children were wanted, was certain:
    its q is one at x. All children of a greedy tree but the first are such, so temperature 0 is greedy matching.
    """

    needs_q = True

    @override
    def choose(self, tree: DraftTree, p: Tensor, noise: RoundNoise | None) -> tuple[Tensor, Tensor]:
        q, _ = tree.drawn_from()
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
        return winner, at(winner, p)


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


@dataclass(frozen=True)
class TwoThresholds(ChoosingRule):
    """Accept children by one coin u per node and two thresholds, as SGLang does.

    A node's children are visited in order, and their probabilities under the target p are added up. The first child is
    accepted for which u < sum / threshold_acc or p >= threshold_single. If there is none, the bonus is drawn from p
    without the children.

    SGLang's `tree_speculative_sampling_target_only` (`--speculative-accept-threshold-single`, `-acc`). With both at 1
    this is one draw from p; lower values emit drafted tokens more often than the target would.
    """

    threshold_single: float = ranged(0, 1, 1.0, above=True)
    threshold_acc: float = ranged(0, 1, 1.0, above=True)

    def __post_init__(self) -> None:
        """Raise ValueError for a threshold outside (0, 1]."""
        check_fields(self)

    @property
    @override
    def lossless(self) -> bool:  # type: ignore[override]
        return self.threshold_single == self.threshold_acc == 1

    @override
    def choose(self, tree: DraftTree, p: Tensor, noise: RoundNoise | None) -> tuple[Tensor, Tensor]:
        single = of_parent(tree, p)
        single[:, 0] = 0  # the root is its own parent, and no child
        siblings = tree.parents[:, :, None] == tree.parents[:, None]
        total = torch.where(siblings.tril(), single[:, None], 0.0).sum(-1)
        coins = coins_of(tree, noise, of_parents=True)
        willing = (coins < total / self.threshold_acc) | (single >= self.threshold_single)
        first = ~(siblings & willing[:, None]).tril(-1).any(-1)
        winner = deepest(tree, willing & first)
        return winner, self._bonus(tree, at(winner, p), winner)

    @staticmethod
    def _bonus(tree: DraftTree, p: Tensor, winner: Tensor) -> Tensor:
        """Return p [B,V] without the tokens of winner's children, or p itself if they have all of it."""
        child = tree.parents == winner[:, None]
        child[:, 0] = False
        others = torch.ones_like(p).scatter_reduce_(1, tree.tokens, (~child).to(p), "amin")
        rest = p * others
        return torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)


@dataclass(frozen=True)
class TypicalAcceptance(ChoosingRule):
    """Accept a token x if p(x) > min(epsilon, alpha exp(-H(p))), where H is the entropy in nats.

    Of the longest accepted paths, the one with the highest probability under the target is emitted, and a bonus drawn
    from p at its end.

    Medusa (arXiv 2401.10774, `evaluate_posterior`), with its defaults: alpha is the root of epsilon. Lossy: a drafted
    token is emitted for certain, not with its probability. At temperature 0, where p is one or zero, this is Medusa's
    greedy matching.
    """

    lossless = False

    epsilon: float = ranged(0, 1, 0.09, above=True)
    alpha: float = ranged(0, 1e6, 0.3, above=True)

    def __post_init__(self) -> None:
        """Raise ValueError unless 0 < epsilon <= 1 and 0 < alpha."""
        check_fields(self)

    @override
    def choose(self, tree: DraftTree, p: Tensor, noise: RoundNoise | None) -> tuple[Tensor, Tensor]:
        entropy = torch.special.entr(p).sum(-1)  # [B,N]
        threshold = (self.alpha * (-entropy).exp()).clamp_(max=self.epsilon)
        likelihood = of_parent(tree, p)
        live = alive(tree, likelihood > threshold.gather(1, tree.parents))
        depth = torch.where(live, tree.depth, -1)
        log = likelihood.log()
        log[:, 0] = 0
        score = torch.where(tree.ancestors, log[:, None], 0.0).sum(-1)
        longest = depth == depth.amax(1, keepdim=True)
        winner = torch.where(longest, score, -torch.inf).max(1).indices
        return winner, at(winner, p)
