"""The target's hidden states and logits, computed while training."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor

from specdec.model.language_model import LanguageModel
from specdec.model.target import Target
from specdec.training.data import Batch
from specdec.training.objectives.losses import DeferredLogits
from specdec.training.objectives.teacher import TeacherLogits

Features = dict[str, Any]  # `teacher_logits` are `TeacherLogits`, the others tensors


def online_features(target, batch: Batch, taps: tuple[int, ...], autocast: AbstractContextManager) -> Features:
    """Run the frozen target over a batch, and return the keyword arguments of an objective.

    These are feats [B,T,F], tokens [B,T], teacher_logits [B,T,V] and loss_mask [B,T], not shifted, and weights [B,T] if
    the batch has them. Logits of our own `Target` are computed where the objective reads them, so that [B,T,V] is never
    in memory; transformers' modules need their head to run.
    """
    tokens = batch.tokens.to(target.device)
    documents = batch.documents.to(target.device) if batch.packed and batch.documents is not None else None
    with torch.no_grad(), autocast:
        if isinstance(target, Target):
            last, width = target.config.layers, target.config.hidden
            read = taps if last in taps else (*taps, last)
            _, states = target(tokens, None, taps=read, logits=False, documents=documents)
            hidden = states[..., read.index(last) * width :][..., :width]
            feats, logits = states[..., : len(taps) * width], deferred_logits(target, hidden, autocast)
        else:
            logits, feats = target(tokens, None, taps=taps, documents=documents)
            feats = logits[..., :0] if feats is None else feats  # of a drafter without taps
    return arguments(batch, feats.float(), logits)


def arguments(batch: Batch, feats: Tensor, logits: TeacherLogits) -> Features:
    """The keyword arguments of an objective: a batch, and what the target makes of it."""
    weights = {} if batch.weights is None else {"weights": batch.weights.to(feats.device)}
    return {
        "feats": feats,
        "tokens": batch.tokens.to(feats.device),
        "teacher_logits": logits,
        "loss_mask": batch.loss_mask.to(feats.device),
    } | weights


def deferred_logits(target: LanguageModel, hidden: Tensor, autocast: AbstractContextManager) -> DeferredLogits:
    """Logits of hidden states [B,T,H], taken after the target's final norm, computed where they are read.

    `autocast` only gives the dtype of the product: it would convert the head's weight for each piece of rows.
    """

    def head_of(ids: Tensor | None) -> Callable[[Tensor], Tensor]:
        dtype = autocast.fast_dtype if isinstance(autocast, torch.autocast) else target.head.weight.dtype
        return torch.no_grad()(cast(Target, target).bind_logits(ids, dtype))

    return DeferredLogits(hidden, head_of, target.vocab)
