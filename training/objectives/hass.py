"""HASS's top-k distillation (arXiv 2408.15766, section 3.1; `train/main_hass.py`)."""

from training.objectives.divergences import Value
from training.objectives.truth import Drafted, Truth


def top_k(draft: Drafted, truth: Truth, k: int = 10) -> Value:
    """-sum p log q over the k tokens that p likes best, p and q as they are over the others too."""
    p, ids = truth.top(k)
    slope = p.new_zeros(len(p), draft.logits.shape[-1]).scatter_(1, ids, -p)
    mass = p.sum(-1, keepdim=True)
    at_best = draft.logits.gather(-1, ids[:, None].expand(-1, draft.best.shape[1], -1))
    value = mass * draft.log_mass - (p[:, None] * at_best).sum(-1)
    return value, slope[:, None], -mass
