"""What the target gives the drafter to learn from, computed while training."""

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from specdec.model import Target
from training.data import Batch


def online_features(
    target: Target, batch: Batch, taps: tuple[int, ...], autocast: AbstractContextManager
) -> dict[str, Tensor]:
    """Run the frozen target over a batch: the keyword arguments of an objective.

    feats [B,T,F], tokens [B,T], target_logits [B,T,V], loss_mask [B,T], nothing shifted.
    """
    device = target.embed.weight.device
    tokens = batch.tokens.to(device)
    documents = None if batch.documents is None else batch.documents.to(device)
    with torch.no_grad(), autocast:
        logits, feats = target(tokens, None, taps=taps, documents=documents)
    return {
        "feats": feats.float(),
        "tokens": tokens,
        "target_logits": logits,
        "loss_mask": batch.loss_mask.to(device),
    }
