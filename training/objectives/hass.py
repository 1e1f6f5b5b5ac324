"""HASS's top-k distillation (arXiv 2408.15766, section 3.1; `train/main_hass.py`)."""

import torch
from torch import Tensor

from training.objectives.truth import Truth


def top_k(logq: Tensor, q: Tensor, truth: Truth, k: int = 10) -> tuple[Tensor, Tensor]:
    """-sum p log q over the k tokens that p likes best, p and q as they are over the others too."""
    best = truth.p.topk(min(k, truth.p.shape[-1]), dim=-1)
    slope = torch.zeros_like(q).scatter_(1, best.indices, -best.values)
    return -(best.values * logq.gather(1, best.indices)).sum(-1), slope
