"""Typical acceptance: drafted tokens that the target finds likely enough are accepted. Lossy."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.sampling.filters import filtered_probs
from specdec.sampling.noise import RoundNoise
from specdec.structs import DraftTree, Sampling, SamplingBatch, Verdict
from specdec.verify.walk import Rule, accept, alive, at, bonus_of, of_parent


@dataclass(frozen=True)
class TypicalAcceptance(Rule):
    """Accept a token x if p(x) > min(epsilon, alpha exp(-H(p))), where H is the entropy in nats.

    Of the longest accepted paths, the one with the highest probability under the target is emitted, and a bonus drawn
    from p at its end.

    Medusa (arXiv 2401.10774, `evaluate_posterior`), with its defaults: alpha is the root of epsilon. Lossy: a drafted
    token is emitted for certain, not with its probability. At temperature 0, where p is one or zero, this is Medusa's
    greedy matching.
    """

    lossless = False

    epsilon: float = 0.09
    alpha: float = 0.3

    def __post_init__(self) -> None:
        """Raise ValueError unless 0 < epsilon <= 1 and alpha > 0."""
        if not 0 < self.epsilon <= 1:
            raise ValueError(f"epsilon must lie in (0, 1], got {self.epsilon}")
        if not self.alpha > 0:
            raise ValueError(f"alpha must be above 0, got {self.alpha}")

    def __call__(
        self, tree: DraftTree, logits: Tensor, sampling: Sampling | SamplingBatch, noise: RoundNoise | None = None
    ) -> Verdict:
        """Verify a tree: see `structs.Verifier`."""
        p = filtered_probs(logits, sampling)
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
        return accept(tree, winner, bonus_of(tree, winner, at(winner, p), noise))
