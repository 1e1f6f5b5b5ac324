"""EAGLE-3's objective: cross-entropy against the target's distribution at every step of the training-time test."""

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.types import Drafter


class Eagle3Objective:
    """sum_j decay^j * CE_j over `steps` unrolled steps (EAGLE-3, section 3; `traineagle3/cnets.py`).

    CE_j = -mean sum_v p(v) log q_j(v), p the target's distribution renormalised over the draft vocabulary. A position
    counts if it belongs to the loss mask and the target's most likely token is in the draft vocabulary. mean 'masked'
    divides by the positions that count; 'all' by all of them, as EAGLE does, which makes the loss depend on padding.
    """

    def __init__(self, steps: int = 7, decay: float = 0.8, mean: str = "masked"):
        if mean not in ("masked", "all"):
            raise ValueError(f"mean must be 'masked' or 'all', got {mean!r}")
        self.steps, self.decay, self.mean = steps, decay, mean

    def __call__(
        self, drafter: Drafter, feats: Tensor, tokens: Tensor, target_logits: Tensor, loss_mask: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Unshifted inputs, as the target gives them: feats [B,T,F], tokens [B,T], target_logits [B,T,V] and
        loss_mask [B,T] (1 where the token is to be learnt). Metrics: per step, losses [steps] and accuracy [steps],
        the share of counted positions whose most likely token agrees with the target's."""
        best = target_logits.argmax(-1)
        known = drafter.vocab.contains().to(best.device)[best]
        probs = drafter.vocab.select(target_logits).float().softmax(-1)
        # Row t drafts token t+2 from feature t and token t+1: ids, targets and mask are all read one position later.
        counted = known * loss_mask
        following = F.pad(tokens[:, 1:], (0, 1))
        losses, accuracy = [], []
        for j, state in enumerate(drafter.unroll(feats, following, self.steps)):
            p, mask = _later(probs, 1 + j), _later(counted, 1 + j)
            logq = state.logits.float().log_softmax(-1)
            entropy = -(p * logq).sum(-1) * mask
            losses.append(entropy.sum() / (mask.sum().clamp(min=1) if self.mean == "masked" else mask.numel()))
            agree = (logq.detach().argmax(-1) == p.argmax(-1)) * mask
            accuracy.append(agree.sum() / mask.sum().clamp(min=1))
        losses = torch.stack(losses)
        weights = self.decay ** torch.arange(self.steps, device=losses.device)
        return (losses * weights).sum(), {"losses": losses.detach(), "accuracy": torch.stack(accuracy)}


def _later(x: Tensor, by: int) -> Tensor:
    """x [B,T,...] read `by` positions later, zeros behind the end."""
    return torch.cat([x[:, by:], torch.zeros_like(x[:, :by])], dim=1)
