"""Losses over a vocabulary, computed in pieces that stay in the cache."""

import torch
from torch import Tensor

ROWS = 256  # rows of a piece: 256 x 4096 fp32 logits are 4 MiB


class _SoftCrossEntropy(torch.autograd.Function):
    """CE(x, p) = lse(x) sum(p) - p.x with gradient softmax(x) sum(p) - p, written while the piece is at hand.

    Nothing in fp32 of the size [T, U] outlives a piece; what is kept for the backward pass is the gradient, in the
    logits' own precision.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        b, t, _ = logits.shape
        loss = torch.empty(b, t, dtype=torch.float32, device=logits.device)
        best = torch.empty(b, t, dtype=torch.int64, device=logits.device)
        grad = torch.empty_like(logits)
        for row in range(b):
            for start in range(0, t, ROWS):
                piece = (row, slice(start, start + ROWS))
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
