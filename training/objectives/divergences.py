"""Distances between the teacher's distribution p and the student's q."""

import math

import torch
from torch import Tensor

from specdec.training.objectives.student import Student
from specdec.training.objectives.teacher import Teacher
from specdec.training.objectives.terms import Value, term


@term
def ce(student: Student, teacher: Teacher) -> Value:
    """-sum p log q."""
    return teacher.cross_entropy(student), teacher.minus_p[:, None], -teacher.mass[:, None]


@term
def kl(student: Student, teacher: Teacher, temperature: float = 1.0) -> Value:
    """KL(p || q) = sum p log(p/q): the cross-entropy less the teacher's own entropy, with the same gradient.

    With a temperature T it is T^2 KL(p' || q'), where p' and q' are p and q at that temperature: the slope is then of
    the same size at any T (arXiv 1503.02531)."""
    if temperature == 1:
        value, slope, total = ce(student, teacher)
        return value - teacher.entropy[:, None], slope, total
    logp = (teacher.logp / temperature).log_softmax(-1)[:, None]
    logq = (student.logits / temperature).log_softmax(-1)
    value = (logp.exp() * (logp - logq)).sum(-1)
    slope = (logq.exp() - logp.exp()).mul_(temperature)  # sums to 0
    return value * temperature**2, slope, torch.zeros_like(value)


@term
def reverse_kl(student: Student, teacher: Teacher) -> Value:
    """KL(q || p) = sum q log(q/p)."""
    slope = (student.logq - teacher.logp[:, None]).mul_(student.q)
    value = slope.sum(-1)
    return value, slope, value


@term
def jsd(student: Student, teacher: Teacher) -> Value:
    """Jensen-Shannon divergence: KL(p || m)/2 + KL(q || m)/2, m = (p + q)/2."""
    logp = teacher.logp[:, None]
    logm = torch.logaddexp(student.logq, logp).sub_(math.log(2))
    slope = (student.logq - logm).mul_(student.q).div_(2)
    total = slope.sum(-1)
    return ((logp - logm) * teacher.p[:, None]).sum(-1) / 2 + total, slope, total


@term
def tv(student: Student, teacher: Teacher) -> Value:
    """Total variation 1 - sum min(p, q) over all V tokens: the chance that rejection sampling refuses a draft."""
    p = teacher.whole[:, None]
    slope = -student.q * (student.q < p)
    return 1 - torch.minimum(student.q, p).sum(-1), slope, slope.sum(-1)


@term
def l1(student: Student, teacher: Teacher) -> Value:
    """sum |p - q| over all V tokens, twice the total variation: DSpark's distance."""
    value, slope, total = tv(student, teacher)
    return 2 * value, 2 * slope, 2 * total


@term
def choice(student: Student, teacher: Teacher) -> Value:
    """-log q of p's likeliest token; speculators calls this one `ce`."""
    return _token(student, teacher.best, torch.ones_like(teacher.mass))


@term
def tokens(student: Student, teacher: Teacher) -> Value:
    """-log q of the token that stands in the text; 0 where none is to be learnt."""
    return _token(student, teacher.labels.clamp(min=0), (teacher.labels >= 0).to(student.logits.dtype))


def _token(student: Student, ids: Tensor, known: Tensor) -> Value:
    """-log q of ids [n], times known [n], 1 or 0."""
    ids, known = ids[:, None], known[:, None]
    at_ids = student.logits.gather(-1, ids.expand(student.best.shape)[..., None]).squeeze(-1)
    slope = student.logits.new_zeros(len(ids), student.logits.shape[-1]).scatter_(1, ids, -known)
    return (student.log_mass - at_ids) * known, slope[:, None], -known
