"""Losses over a vocabulary, computed in pieces that stay in the cache."""

from collections.abc import Iterator

import torch
from torch import Tensor

ROWS = 256  # rows of a piece: 256 x 4096 fp32 logits are 4 MiB


def _pieces(rows: Tensor) -> Iterator[tuple[int, slice]]:
    """Indices that cut rows [B,T,...] into pieces."""
    for row in range(rows.shape[0]):
        for start in range(0, rows.shape[1], ROWS):
            yield row, slice(start, start + ROWS)


class _SoftCrossEntropy(torch.autograd.Function):
    """CE(x, p) = lse(x) sum(p) - p.x with gradient softmax(x) sum(p) - p, written while the piece is at hand.

    Nothing in fp32 of the size [T, U] outlives a piece; what is kept for the backward pass is the gradient, in the
    logits' own precision.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        loss = torch.empty(logits.shape[:2], dtype=torch.float32, device=logits.device)
        best = torch.empty(logits.shape[:2], dtype=torch.int64, device=logits.device)
        grad = torch.empty_like(logits)
        for piece in _pieces(logits):
            x, p = logits[piece].float(), probs[piece]
            mass = p.sum(-1, keepdim=True)
            lse = x.logsumexp(-1, keepdim=True)
            # Not `vecdot`: autocast would round it to bf16.
            loss[piece] = (lse * mass).squeeze(-1) - (x * p).sum(-1)
            best[piece] = x.max(-1).indices
            grad[piece] = (x - lse).exp_().mul_(mass).sub_(p)
        ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(best)
        return loss, best

    @staticmethod
    def backward(ctx, grad_loss: Tensor, _) -> tuple[Tensor, None]:
        (grad,) = ctx.saved_tensors
        return grad * grad_loss[..., None].to(grad.dtype), None


def soft_cross_entropy(logits: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    """-sum_v p(v) log softmax(x)(v), and the most likely token: logits, probs [B,T,U] -> [B,T] fp32, [B,T].

    probs are constants in fp32; only the logits get a gradient.
    """
    return _SoftCrossEntropy.apply(logits, probs)


class _TokenCrossEntropy(torch.autograd.Function):
    """CE(x, i) = lse(x) - x_i with gradient softmax(x) - onehot(i), in pieces as above."""

    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        loss = torch.empty(labels.shape, dtype=torch.float32, device=logits.device)
        best = torch.empty_like(labels)
        grad = torch.empty_like(logits)
        for piece in _pieces(labels):
            x, i = logits[piece].float(), labels[piece][:, None]
            lse = x.logsumexp(-1, keepdim=True)
            loss[piece] = (lse - x.gather(1, i)).squeeze(-1)
            best[piece] = x.max(-1).indices
            grad[piece] = (x - lse).exp_().scatter_add_(1, i, torch.full_like(lse, -1.0))
        ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(best)
        return loss, best

    @staticmethod
    def backward(ctx, grad_loss: Tensor, _) -> tuple[Tensor, None]:
        (grad,) = ctx.saved_tensors
        return grad * grad_loss[..., None].to(grad.dtype), None


def token_cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """-log softmax(x)(label), and the most likely token: logits [B,T,U], labels [B,T] -> [B,T] fp32, [B,T]."""
    return _TokenCrossEntropy.apply(logits, labels)
