"""Distances between the target's distribution p and the drafter's q.

A term is a function (logq [n,U], q [n,U], truth) -> (value [n], slope [n,U]), slope_v = d value / d log q_v with the
entries of log q taken as independent. Multiples of q may be left out of the slope: the softmax projects them out. The
slope is the caller's to overwrite; what the term was given is not the term's.
"""

import math

import torch
from torch import Tensor

from training.objectives.truth import Truth


def ce(logq: Tensor, q: Tensor, truth: Truth) -> tuple[Tensor, Tensor]:
    """-sum p log q."""
    return -torch.linalg.vecdot(truth.p, logq), -truth.p


def kl(logq: Tensor, q: Tensor, truth: Truth) -> tuple[Tensor, Tensor]:
    """KL(p || q) = sum p log(p/q): the cross-entropy less the target's own entropy, with the same gradient."""
    value, slope = ce(logq, q, truth)
    return value - truth.entropy, slope


def reverse_kl(logq: Tensor, q: Tensor, truth: Truth) -> tuple[Tensor, Tensor]:
    """KL(q || p) = sum q log(q/p)."""
    slope = (logq - truth.logp).mul_(q)
    return slope.sum(-1), slope


def jsd(logq: Tensor, q: Tensor, truth: Truth) -> tuple[Tensor, Tensor]:
    """Jensen-Shannon divergence: KL(p || m)/2 + KL(q || m)/2, m = (p + q)/2."""
    logm = torch.logaddexp(logq, truth.logp).sub_(math.log(2))
    slope = (logq - logm).mul_(q).div_(2)
    return ((truth.logp - logm) * truth.p).sum(-1) / 2 + slope.sum(-1), slope


def tv(logq: Tensor, q: Tensor, truth: Truth) -> tuple[Tensor, Tensor]:
    """Total variation 1 - sum min(p, q) over all V tokens: how often rejection sampling refuses the draft."""
    return 1 - torch.minimum(q, truth.whole).sum(-1), -q * (q < truth.whole)


def choice(logq: Tensor, q: Tensor, truth: Truth) -> tuple[Tensor, Tensor]:
    """-log q of the likeliest token under p; speculators calls this one `ce`."""
    return _token(logq, truth.logp.argmax(-1))


def tokens(logq: Tensor, q: Tensor, truth: Truth) -> tuple[Tensor, Tensor]:
    """-log q of the token that the text has there; 0 where there is none to learn."""
    value, slope = _token(logq, truth.labels.clamp(min=0))
    known = truth.labels >= 0
    return value * known, slope.mul_(known[:, None])


def _token(logq: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    ids = ids[:, None]
    return -logq.gather(1, ids).squeeze(1), torch.zeros_like(logq).scatter_(1, ids, -1.0)
