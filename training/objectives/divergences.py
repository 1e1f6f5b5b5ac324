"""Distances between the target's distribution p and the drafter's q.

A term is a function (draft, truth) -> (value [n,J], slope, total). slope_v = d value / d log q_v with the entries of
log q taken as independent, in a shape that broadcasts to [n,J,U]; total [n,J], or what broadcasts to it, is its sum
over v. By the logits the gradient is then slope - q total, so multiples of q may be left out of both. A slope may be
shared: it is read, never written to.
"""

import math

import torch
from torch import Tensor

from training.objectives.truth import Drafted, Truth

Value = tuple[Tensor, Tensor, Tensor]


def ce(draft: Drafted, truth: Truth) -> Value:
    """-sum p log q."""
    return truth.cross_entropy(draft), truth.minus_p[:, None], -truth.mass[:, None]


def kl(draft: Drafted, truth: Truth) -> Value:
    """KL(p || q) = sum p log(p/q): the cross-entropy less the target's own entropy, with the same gradient."""
    value, slope, total = ce(draft, truth)
    return value - truth.entropy[:, None], slope, total


def reverse_kl(draft: Drafted, truth: Truth) -> Value:
    """KL(q || p) = sum q log(q/p)."""
    slope = (draft.logq - truth.logp[:, None]).mul_(draft.q)
    value = slope.sum(-1)
    return value, slope, value


def jsd(draft: Drafted, truth: Truth) -> Value:
    """Jensen-Shannon divergence: KL(p || m)/2 + KL(q || m)/2, m = (p + q)/2."""
    logp = truth.logp[:, None]
    logm = torch.logaddexp(draft.logq, logp).sub_(math.log(2))
    slope = (draft.logq - logm).mul_(draft.q).div_(2)
    total = slope.sum(-1)
    return ((logp - logm) * truth.p[:, None]).sum(-1) / 2 + total, slope, total


def tv(draft: Drafted, truth: Truth) -> Value:
    """Total variation 1 - sum min(p, q) over all V tokens: how often rejection sampling refuses the draft."""
    p = truth.whole[:, None]
    slope = -draft.q * (draft.q < p)
    return 1 - torch.minimum(draft.q, p).sum(-1), slope, slope.sum(-1)


def choice(draft: Drafted, truth: Truth) -> Value:
    """-log q of the likeliest token under p; speculators calls this one `ce`."""
    return _token(draft, truth.best, torch.ones_like(truth.mass))


def tokens(draft: Drafted, truth: Truth) -> Value:
    """-log q of the token that the text has there; 0 where there is none to learn."""
    return _token(draft, truth.labels.clamp(min=0), (truth.labels >= 0).to(draft.logits.dtype))


def _token(draft: Drafted, ids: Tensor, known: Tensor) -> Value:
    """ids [n], known [n] 1 or 0."""
    ids, known = ids[:, None], known[:, None]
    at_ids = draft.logits.gather(-1, ids.expand(draft.best.shape)[..., None]).squeeze(-1)
    slope = draft.logits.new_zeros(len(ids), draft.logits.shape[-1]).scatter_(1, ids, -known)
    return (draft.log_mass - at_ids) * known, slope[:, None], -known
