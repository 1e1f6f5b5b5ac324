"""A tau that is given, not measured, for pairs with random weights.

Random weights cost what trained weights of the same shapes cost, but nothing that they draft is accepted.
`SimulatedTau` lets such a pair decode as if a given number of tokens were accepted. The times are real, and the text is
void. Mark every number that comes from it as SIMULATED.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec.sampling.noise import RoundNoise
from specdec.structs import DraftTree, Sampling, SamplingBatch, Verdict, Verifier
from specdec.verify import sample_and_match

MARK = "SIMULATED"


@dataclass
class SimulatedTau:
    """Does all the work of `verifier`, and then lets every row emit a number of tokens that depends on the round alone.

    Round r of this object emits floor((r+1) tau) - floor(r tau) tokens, the bonus counted, so that k rounds emit k tau
    tokens, rounded down. The accepted nodes are the tree's first ones, even if they are not on one path: as many keys
    move as on a path of that length. Its text is not the target's, so `specdec.verify` does not list it.

    The count of rounds is on the device, so that nothing waits for it and a captured round continues counting.
    """

    tau: float
    verifier: Verifier = sample_and_match
    rounds: Tensor | None = field(default=None, init=False, repr=False)

    lossless = False

    def __post_init__(self) -> None:
        """Take over the flags of `verifier`. Raises ValueError for a tau below 1 or infinite."""
        if not 1 <= self.tau < float("inf"):
            raise ValueError(f"a simulated tau must be at least 1, the bonus token, got {self.tau}")
        self.needs_q, self.chains_only = self.verifier.needs_q, self.verifier.chains_only
        self.likeliest_only, self.couples = self.verifier.likeliest_only, self.verifier.couples

    def __str__(self) -> str:
        """Return the rule's name for titles and tables."""
        return f"{MARK} tau {self.tau:g}"

    def check(self, steps: int) -> None:
        """Raise ValueError unless rounds of a tree of `steps` levels can emit so many tokens."""
        if self.tau > steps + 1:
            raise ValueError(
                f"a simulated tau of {self.tau:g} needs trees of at least {self.tau - 1:g} levels, this one has {steps}"
            )

    def __call__(
        self, tree: DraftTree, logits: Tensor, sampling: Sampling | SamplingBatch, noise: RoundNoise | None = None
    ) -> Verdict:
        """Run `verifier`, then replace its path by the round's number of nodes. The bonus token stays."""
        true = self.verifier(tree, logits, sampling, noise)
        if self.rounds is None or self.rounds.device != logits.device:
            self.check(tree.steps)
            self.rounds = torch.zeros(1, dtype=torch.float64, device=logits.device)
        b, nodes = tree.tokens.shape
        before = (self.rounds * self.tau).floor()
        self.rounds += 1
        n = ((self.rounds * self.tau).floor() - before).long().clamp(max=tree.steps + 1).expand(b)
        path = torch.arange(tree.steps + 1, device=logits.device).clamp(max=nodes - 1)
        path = torch.where(path < n[:, None], path, 0)
        bonus = true.tokens.gather(1, true.n[:, None] - 1)
        tokens = tree.tokens.gather(1, path).roll(-1, 1).scatter(1, n[:, None] - 1, bonus)
        return Verdict(path=path, n=n, tokens=tokens)
