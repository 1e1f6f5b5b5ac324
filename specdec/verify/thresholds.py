"""SGLang's rule with two thresholds, lossless only if both are 1."""

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from specdec.sampling.filters import filtered_probs
from specdec.sampling.noise import RoundNoise
from specdec.structs import DraftTree, Sampling, SamplingBatch, Verdict
from specdec.verify.walk import Rule, accept, at, bonus_of, coins_of, deepest, of_parent


@dataclass(frozen=True)
class TwoThresholds(Rule):
    """Accept children by one coin u per node and two thresholds, as SGLang does.

    A node's children are visited in order, and their probabilities under the target p are added up. The first child is
    accepted for which u < sum / threshold_acc or p >= threshold_single. If there is none, the bonus is drawn from p
    without the children.

    SGLang's `tree_speculative_sampling_target_only` (`--speculative-accept-threshold-single`, `-acc`). With both at 1
    this is one draw from p; lower values emit drafted tokens more often than the target would.
    """

    threshold_single: float = 1.0
    threshold_acc: float = 1.0

    def __post_init__(self) -> None:
        """Raise ValueError for a threshold outside (0, 1]."""
        for name in ("threshold_single", "threshold_acc"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie in (0, 1], got {getattr(self, name)}")

    @property
    @override
    def lossless(self) -> bool:  # type: ignore[override]
        return self.threshold_single == self.threshold_acc == 1

    def __call__(
        self, tree: DraftTree, logits: Tensor, sampling: Sampling | SamplingBatch, noise: RoundNoise | None = None
    ) -> Verdict:
        """Verify a tree: see `structs.Verifier`."""
        p = filtered_probs(logits, sampling)
        single = of_parent(tree, p)
        single[:, 0] = 0  # the root is its own parent, and no child
        siblings = tree.parents[:, :, None] == tree.parents[:, None]
        total = torch.where(siblings.tril(), single[:, None], 0.0).sum(-1)
        coins = coins_of(tree, noise, of_parents=True)
        willing = (coins < total / self.threshold_acc) | (single >= self.threshold_single)
        first = ~(siblings & willing[:, None]).tril(-1).any(-1)
        winner = deepest(tree, willing & first)
        rest = self._bonus(tree, at(winner, p), winner)
        return accept(tree, winner, bonus_of(tree, winner, rest, noise))

    @staticmethod
    def _bonus(tree: DraftTree, p: Tensor, winner: Tensor) -> Tensor:
        """Return p [B,V] without the tokens of winner's children.

        If the children have all of p and were rejected by rounding only, return p itself.
        """
        child = tree.parents == winner[:, None]
        child[:, 0] = False
        others = torch.ones_like(p).scatter_reduce_(1, tree.tokens, (~child).to(p), "amin")
        rest = p * others
        return torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)
