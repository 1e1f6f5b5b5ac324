"""The student's distribution q: what the drafter says at n positions, in J steps of the unroll."""

from functools import cached_property

from torch import Tensor

from specdec.sampling.likely import largest


class Student:
    """q = softmax(logits). Each quantity is computed when a term first asks for it, as passes over the vocabulary are
    most of a training step's time on a CPU."""

    def __init__(self, logits: Tensor):
        """logits [n,J,U]"""
        self.logits = logits
        self.top, self.best = largest(logits)  # [n,J]

    @cached_property
    def q(self) -> Tensor:
        """[n,J,U]"""
        return self.logits.softmax(-1)

    @cached_property
    def log_mass(self) -> Tensor:
        """[n,J] log sum exp(logits), computed from the likeliest token: its logit less its log q."""
        return self.top - self.q.gather(-1, self.best[..., None]).squeeze(-1).log()

    @cached_property
    def logq(self) -> Tensor:
        """[n,J,U]"""
        return self.logits - self.log_mass[..., None]
