"""EAGLE-1/2's objective: the target's next feature, and what the target's head makes of it (arXiv 2401.15077)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.eagle import Eagle
from training.losses import soft_cross_entropy


class EagleObjective:
    """feature * SmoothL1(draft feature, target's next feature) + logits * CE(target's distribution, draft logits).

    As `eagle/train/main.py`: weights 1 and 0.1, and uniform noise on the input features, of width `noise` (0.2) at 512
    tokens and narrower in longer texts. steps > 1 feeds the drafter's own output back, step j weighted decay^j, which
    HASS (arXiv 2408.15766) and EAGLE-3 do, and EAGLE does not.
    """

    def __init__(
        self, feature: float = 1.0, logits: float = 0.1, noise: float = 0.2, steps: int = 1, decay: float = 0.8
    ):
        if steps < 1:
            raise ValueError(f"objective.steps must be at least 1, got {steps}")
        self.feature, self.logits, self.noise, self.steps, self.decay = feature, logits, noise, steps, decay

    def __call__(
        self, drafter: Eagle, feats: Tensor, tokens: Tensor, target_logits: Tensor, loss_mask: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Unshifted inputs: feats [B,T,H], tokens [B,T], target_logits [B,T,V], loss_mask [B,T]. Metrics, per step:
        losses, feature_losses, and accuracy, the share of counted positions that agree with the target's choice;
        and counted, their number at the first step."""
        if not isinstance(drafter, Eagle):
            raise ValueError(
                f"objective=eagle compares a drafter's state with the target's next feature, which "
                f"{type(drafter).__name__} does not predict; use objective=eagle3 or objective=mtp"
            )
        length = tokens.shape[1]
        probs = drafter.vocab.select(target_logits).float().softmax(-1)
        choice = drafter.vocab.to_target(probs.argmax(-1))
        counted = loss_mask * (choice == target_logits.argmax(-1))
        inputs = feats
        if self.noise and torch.is_grad_enabled():  # not while evaluating
            inputs = feats + (torch.rand_like(feats) - 0.5) * self.noise * 512 / length
        losses, feature_losses, accuracy = [], [], []
        following = F.pad(tokens[:, 1:], (0, 1))
        for j, state in enumerate(drafter.unroll(inputs, following, self.steps)):
            later = 1 + j  # row t predicts feature t+1+j, and through it token t+2+j
            here = max(length - later, 0)
            mask = counted[:, later:]
            total = mask.sum().clamp(min=1)
            distance = F.smooth_l1_loss(state.hidden[:, :here].float(), feats[:, later:], reduction="none").mean(-1)
            entropy, best = soft_cross_entropy(state.logits[:, :here], probs[:, later:])
            feature_losses.append((distance * mask).sum() / total)
            losses.append((entropy * mask).sum() / total)
            accuracy.append(((drafter.vocab.to_target(best) == choice[:, later:]) * mask).sum() / total)
        losses, feature_losses = torch.stack(losses), torch.stack(feature_losses)
        weights = self.decay ** torch.arange(self.steps, device=losses.device)
        metrics = {
            "losses": losses.detach(),
            "feature_losses": feature_losses.detach(),
            "counted": counted[:, 1:].sum(),
        }
        loss = ((self.feature * feature_losses + self.logits * losses) * weights).sum()
        return loss, metrics | {"accuracy": torch.stack(accuracy), "counted": counted[:, 1:].sum()}
