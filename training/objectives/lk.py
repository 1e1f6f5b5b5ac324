"""LK losses: the chance that a draft is accepted, made large itself (arXiv 2602.23881).

alpha = sum_v min(p_v, q_v), p the target's distribution over all its tokens, as rejection sampling has it.
"""

import torch

from training.objectives.divergences import Value, kl, tv
from training.objectives.truth import Drafted, Truth

LEAST = 1e-5  # alpha is taken for no less, so that a drafter far off gets a steep slope, not an infinite one


def lk(draft: Drafted, truth: Truth) -> Value:
    """-log alpha. Its gradient is that of the total variation over alpha, which is large where little is accepted."""
    rejected, slope, total = tv(draft, truth)
    alpha = (1 - rejected).clamp(min=LEAST)
    return -alpha.log(), slope / alpha[..., None], total / alpha


def lk_hybrid(draft: Drafted, truth: Truth, scale: float = 1.0, decay: float = 3.0) -> Value:
    """w KL(p || q) + (1 - w) (1 - alpha), w = scale exp(-decay alpha) a constant for the gradient.

    decay 3 is the paper's best and speculators' default; SpecForge's is 1.
    """
    rejected, slope, total = tv(draft, truth)
    distance, pull, pull_total = kl(draft, truth)
    w = scale * torch.exp(-decay * (1 - rejected))
    value = w * distance + (1 - w) * rejected
    return value, torch.lerp(slope, pull, w[..., None]), torch.lerp(total, pull_total.expand_as(total), w)
