"""What the target gives the drafter to learn from, computed while training."""

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from specdec.model import Target
from training.data import Batch
from training.losses import DeferredLogits


def online_features(
    target: Target, batch: Batch, taps: tuple[int, ...], autocast: AbstractContextManager, deferred: bool = False
) -> dict[str, Tensor | DeferredLogits]:
    """Run the frozen target over a batch: the keyword arguments of an objective.

    feats [B,T,F], tokens [B,T], target_logits [B,T,V], loss_mask [B,T], nothing shifted, and weights [B,T] if the batch
    has them. deferred: the logits are made where the objective asks for them, so that [B,T,V] never exists; for our own
    `Target` only.
    """
    device = target.embed.weight.device
    tokens = batch.tokens.to(device)
    documents = None if batch.documents is None else batch.documents.to(device)
    last = target.config.layers
    with torch.no_grad(), autocast:
        if deferred:
            _, states = target(tokens, None, taps=(*taps, last), logits=False, documents=documents)
            feats, hidden = states.tensor_split([states.shape[-1] - target.config.hidden], dim=-1)
            logits = DeferredLogits(hidden, lambda x: _under(autocast, target, x), target.config.vocab)
        else:
            logits, feats = target(tokens, None, taps=taps, documents=documents)
    weights = {} if batch.weights is None else {"weights": batch.weights.to(device)}
    return {
        "feats": feats.float(),
        "tokens": tokens,
        "target_logits": logits,
        "loss_mask": batch.loss_mask.to(device),
    } | weights


@torch.no_grad()
def _under(autocast: AbstractContextManager, target: Target, hidden: Tensor) -> Tensor:
    with autocast:
        return target.logits(hidden)
