"""LK losses: the chance that a draft is accepted, made large itself (arXiv 2602.23881).

alpha = sum_v min(p_v, q_v), p the target's distribution over all its tokens, as rejection sampling has it.
"""

import torch
from torch import Tensor

from training.objectives.divergences import kl, tv
from training.objectives.truth import Truth

LEAST = 1e-5  # alpha is taken for no less, so that a drafter far off gets a steep slope, not an infinite one


def lk(logq: Tensor, q: Tensor, truth: Truth) -> tuple[Tensor, Tensor]:
    """-log alpha. Its gradient is that of the total variation over alpha, which is large where little is accepted."""
    rejected, slope = tv(logq, q, truth)
    alpha = (1 - rejected).clamp(min=LEAST)
    return -alpha.log(), slope / alpha[:, None]


def lk_hybrid(logq: Tensor, q: Tensor, truth: Truth, scale: float = 1.0, decay: float = 3.0) -> tuple[Tensor, Tensor]:
    """w KL(p || q) + (1 - w) (1 - alpha), w = scale exp(-decay alpha) a constant for the gradient.

    decay 3 is the paper's best and speculators' default; SpecForge's is 1.
    """
    rejected, slope = tv(logq, q, truth)
    distance, pull = kl(logq, q, truth)
    w = scale * torch.exp(-decay * (1 - rejected))
    return w * distance + (1 - w) * rejected, torch.lerp(slope, pull, w[:, None])
