"""Sample and match: the default."""

from dataclasses import dataclass

from torch import Tensor

from specdec.sampling.draws import sample
from specdec.sampling.noise import RoundNoise
from specdec.structs import DraftTree, Sampling, SamplingBatch, Verdict
from specdec.verify.walk import Rule, follow


@dataclass(frozen=True)
class SampleAndMatch(Rule):
    """Draw the target's token at every node, and walk down from the root while a child carries the drawn token.

    Each emitted token is a draw from the target's own distribution given the tokens before it, so the output is
    distributed as the target's whatever was drafted. For trees of distinct siblings the accepted length has the same
    law as EAGLE's accept-or-renormalise walk: a node is left through one of its children with the children's total
    probability. The greedy and the sampled case are the same code.
    """

    likeliest_only = True
    couples = True

    def __call__(
        self, tree: DraftTree, logits: Tensor, sampling: Sampling | SamplingBatch, noise: RoundNoise | None = None
    ) -> Verdict:
        """Verify a tree: see `structs.Verifier`."""
        return follow(tree, sample(logits, sampling, noise, tree.depth))


sample_and_match = SampleAndMatch()
