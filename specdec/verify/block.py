"""Block verification: the tokens of a chain are accepted together rather than one by one."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.sampling.filters import filtered_probs
from specdec.sampling.noise import RoundNoise
from specdec.structs import DraftTree, Sampling, SamplingBatch, Verdict
from specdec.verify.walk import Rule, accept, at, bonus_of, coins_of, of_parent, residual


@dataclass(frozen=True)
class BlockVerification(Rule):
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

    def __call__(
        self, tree: DraftTree, logits: Tensor, sampling: Sampling | SamplingBatch, noise: RoundNoise | None = None
    ) -> Verdict:
        """Verify a chain: see `structs.Verifier`."""
        p, (q, _) = filtered_probs(logits, sampling), tree.drawn_from()  # node i of a chain is x_i
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
        bonus = torch.where(at_end, at(winner, p), residual(at(winner, scaled), at(winner, q)))
        return accept(tree, winner, bonus_of(tree, winner, bonus, noise))
