"""Heads that guess tokens ahead, trained on the text's own tokens: MTP (arXiv 2412.19437, 2509.18362) and Medusa."""

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.types import Drafter
from training.losses import token_cross_entropy


class TokensObjective:
    """sum_j w_j * CE_j, CE_j the cross-entropy of the token that stands j + 1 places after the known one, over `steps`
    unrolled steps, w_j = decay^j / sum decay^j.

    FastMTP weights the recursions of one MTP head so, with decay 0.6; Medusa its heads with decay 0.8. Trained on the
    target's own answers this is distillation by samples. A position counts if it belongs to the loss mask and its token
    to the draft vocabulary.
    """

    def __init__(self, steps: int = 3, decay: float = 0.6):
        if steps < 1:
            raise ValueError(f"objective.steps must be at least 1, got {steps}")
        self.steps, self.decay = steps, decay

    def __call__(
        self, drafter: Drafter, feats: Tensor, tokens: Tensor, target_logits: Tensor, loss_mask: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Unshifted inputs: feats [B,T,F], tokens [B,T], target_logits [B,T,V], loss_mask [B,T]. Metrics, per step:
        losses, and accuracy, the share of counted positions that agree with the target's choice; and counted, their
        number at the first step."""
        vocab, length = drafter.vocab, tokens.shape[1]
        labels = _draft_labels(vocab, tokens)
        choice = target_logits.argmax(-1)
        losses, accuracy = [], []
        following = F.pad(tokens[:, 1:], (0, 1))
        for j, state in enumerate(drafter.unroll(feats, following, self.steps)):
            later = 2 + j  # row t guesses token t+2+j, which the target drew from its logits at t+1+j
            here = max(length - later, 0)
            wanted, logits = labels[:, later:], state.logits[:, :here]
            mask = loss_mask[:, later:] * (wanted >= 0)
            total = mask.sum().clamp(min=1)
            entropy, best = token_cross_entropy(logits, wanted.clamp(min=0))
            losses.append((entropy * mask).sum() / total)
            accuracy.append(((vocab.to_target(best) == choice[:, later - 1 : length - 1]) * mask).sum() / total)
        losses = torch.stack(losses)
        weights = self.decay ** torch.arange(self.steps, device=losses.device)
        weights = weights / weights.sum()
        counted = (loss_mask[:, 2:] * (labels[:, 2:] >= 0)).sum()
        metrics = {"losses": losses.detach(), "accuracy": torch.stack(accuracy), "counted": counted}
        return (losses * weights).sum(), metrics


def _draft_labels(vocab, tokens: Tensor) -> Tensor:
    """Target ids -> draft ids, any shape; -1 for tokens outside the draft vocabulary."""
    if vocab.ids is None:
        return tokens
    place = torch.full((vocab.target_size,), -1, device=tokens.device)
    place[vocab.ids] = torch.arange(vocab.size, device=tokens.device)
    return place[tokens]
