"""What the target and the drafter say at the positions of a piece.

n positions, J steps of the unroll that draft for each: the target's have [n,...], the drafter's [n,J,...].
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass
class Truth:
    """The target's distribution over the draft vocabulary, its choice, and the token that follows.

    Terms of a loss read of it what they need; what only some need is computed for those, once for all steps.
    """

    logp: Tensor  # [n,U] log p; sums to 1 over the draft vocabulary if it is renormalised there
    log_share: Tensor | None  # [n,1] log of the draft vocabulary's part of the target's mass; None: p has it
    choice: Tensor  # [n] the target's most likely token, a target id
    labels: Tensor  # [n] draft id of the text's own next token, -1 where there is none to learn

    @cached_property
    def p(self) -> Tensor:
        """[n,U]"""
        return self.logp.exp()

    @cached_property
    def minus_p(self) -> Tensor:
        """[n,U]"""
        return -self.p

    @cached_property
    def mass(self) -> Tensor:
        """[n] sum of p: 1 unless the draft vocabulary lacks some of it."""
        return self.p.sum(-1)

    @cached_property
    def whole(self) -> Tensor:
        """[n,U] p as the verifier has it: a probability among all V tokens."""
        return self.p if self.log_share is None else self.p * self.log_share.exp()

    @cached_property
    def entropy(self) -> Tensor:
        """[n] -sum p log p"""
        return torch.special.entr(self.p).sum(-1)


class Drafted:
    """The drafter's distribution q = softmax(logits). Passes over the vocabulary are most of a step's time on a CPU, so
    each is made only if a term asks for it."""

    def __init__(self, logits: Tensor):
        """logits [n,J,U]"""
        self.logits = logits
        self.top, self.best = logits.max(-1)  # [n,J]; on the CPU several times faster than argmax

    @cached_property
    def q(self) -> Tensor:
        """[n,J,U]"""
        return self.logits.softmax(-1)

    @cached_property
    def log_mass(self) -> Tensor:
        """[n,J] log sum exp(logits), read off the likeliest token."""
        return self.top - self.q.gather(-1, self.best[..., None]).squeeze(-1).log()

    @cached_property
    def logq(self) -> Tensor:
        """[n,J,U]"""
        return self.logits - self.log_mass[..., None]
