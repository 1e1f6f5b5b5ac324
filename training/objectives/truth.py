"""What the target says at the positions of a piece."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass
class Truth:
    """n positions: the target's distribution over the draft vocabulary, its choice, and the token that follows.

    Terms of a loss read of it what they need; what only some need is computed for those.
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
    def whole(self) -> Tensor:
        """[n,U] p as the verifier has it: a probability among all V tokens."""
        return self.p if self.log_share is None else self.p * self.log_share.exp()

    @cached_property
    def entropy(self) -> Tensor:
        """[n] -sum p log p"""
        return torch.special.entr(self.p).sum(-1)
