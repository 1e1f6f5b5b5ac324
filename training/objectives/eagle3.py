"""EAGLE-3's objective: cross-entropy against the target's distribution at every step of the training-time test."""

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.types import Drafter
from training.losses import soft_cross_entropy


class Eagle3Objective:
    """sum_j decay^j * CE_j over `steps` unrolled steps (EAGLE-3, section 3; `traineagle3/cnets.py`).

    CE_j = -mean sum_v p(v) log q_j(v), p the target's distribution renormalised over the draft vocabulary. A position
    counts if it belongs to the loss mask and the target's most likely token is in the draft vocabulary. mean 'masked'
    divides by the positions that count; 'all' by all of them, as EAGLE does, which makes the loss depend on padding.
    """

    def __init__(self, steps: int = 7, decay: float = 0.8, mean: str = "masked"):
        if steps < 1:
            raise ValueError(f"objective.steps must be at least 1, got {steps}")
        if mean not in ("masked", "all"):
            raise ValueError(f"mean must be 'masked' or 'all', got {mean!r}")
        self.steps, self.decay, self.mean = steps, decay, mean

    def __call__(
        self, drafter: Drafter, feats: Tensor, tokens: Tensor, target_logits: Tensor, loss_mask: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Unshifted inputs, as the target gives them: feats [B,T,F], tokens [B,T], target_logits [B,T,V] and
        loss_mask [B,T] (1 where the token is to be learnt). Metrics: per step, losses [steps] and accuracy [steps],
        the share of counted positions whose most likely token agrees with the target's; and counted, the number of
        positions behind the first mean."""
        known = drafter.vocab.contains().to(tokens.device)[target_logits.argmax(-1)]
        probs = drafter.vocab.select(target_logits).float().softmax(-1)
        choice, counted = probs.argmax(-1), known * loss_mask
        losses, accuracy = [], []
        # Row t drafts token t+2 from feature t and token t+1: ids, targets and mask are all read one position later.
        following = F.pad(tokens[:, 1:], (0, 1))
        for j, state in enumerate(drafter.unroll(feats, following, self.steps)):
            later = 1 + j
            here = max(tokens.shape[1] - later, 0)  # the last rows have nothing to learn from
            entropy, best = soft_cross_entropy(state.logits[:, :here], probs[:, later:])
            mask = counted[:, later:]
            total = mask.sum().clamp(min=1) if self.mean == "masked" else counted.numel()
            losses.append((entropy * mask).sum() / total)
            accuracy.append(((best == choice[:, later:]) * mask).sum() / mask.sum().clamp(min=1))
        losses = torch.stack(losses)
        weights = self.decay ** torch.arange(self.steps, device=losses.device)
        metrics = {"losses": losses.detach(), "accuracy": torch.stack(accuracy)}
        metrics["counted"] = counted[:, 1:].sum() if self.mean == "masked" else losses.new_tensor(counted.numel())
        return (losses * weights).sum(), metrics
