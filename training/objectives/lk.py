"""LK losses: they raise the chance alpha that a draft is accepted (arXiv 2602.23881).

alpha = sum_v min(p_v, q_v), with p the teacher's distribution over all V tokens, as rejection sampling uses it.
"""

import torch

from specdec.training.objectives.divergences import kl, tv
from specdec.training.objectives.student import Student
from specdec.training.objectives.teacher import Teacher
from specdec.training.objectives.terms import Value, term

LEAST = 1e-5  # of alpha: a student far off gets a steep slope, not an infinite one


@term
def lk(student: Student, teacher: Teacher) -> Value:
    """-log alpha. Its gradient is that of the total variation divided by alpha: large where little is accepted."""
    rejected, slope, total = tv(student, teacher)
    alpha = (1 - rejected).clamp(min=LEAST)
    return -alpha.log(), slope / alpha[..., None], total / alpha


@term
def lk_hybrid(student: Student, teacher: Teacher, scale: float = 1.0, decay: float = 3.0) -> Value:
    """w KL(p || q) + (1 - w) (1 - alpha), where w = scale exp(-decay alpha) is a constant for the gradient.

    decay = 3 is the paper's best and speculators' default; SpecForge's is 1.
    """
    rejected, slope, total = tv(student, teacher)
    distance, pull, pull_total = kl(student, teacher)
    w = scale * torch.exp(-decay * (1 - rejected))
    value = w * distance + (1 - w) * rejected
    return value, torch.lerp(slope, pull, w[..., None]), torch.lerp(total, pull_total.expand_as(total), w)
