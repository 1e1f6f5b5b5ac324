"""The likeliest tokens, and log-probabilities before any filter."""

from collections.abc import Callable

from torch import Tensor

from specdec.ops.tokens import likeliest

BLOCK, MANY = 64, 8192  # of `top` and `largest`, on the CPU


def top_logprobs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """logits [..., V] -> log-probabilities and ids [..., k] of the k most likely tokens, best first, in fp32."""
    return likeliest(logits) if k == 1 else top(logits.float().log_softmax(-1), k)


def top(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of scores [..., V], best first, and their places.

    torch's `topk` on the CPU handles every element as a pair of value and place. Of many it is quicker to look for them
    in a few blocks (docs/log.md).
    """
    if k == 1:  # of equals the first, as `argmax`
        return scores.max(-1, keepdim=True)
    size = scores.shape[-1]
    if scores.device.type != "cpu" or size % BLOCK or size < max(MANY, k * BLOCK):
        return scores.topk(k, dim=-1)
    return _by_blocks(scores, lambda x: x.topk(k, dim=-1))


def largest(scores: Tensor) -> tuple[Tensor, Tensor]:
    """As scores.max(-1). On the CPU a maximum takes a tenth of the time if its place is not asked for."""
    if scores.device.type != "cpu" or scores.shape[-1] % BLOCK:
        return scores.max(-1)
    value, place = _by_blocks(scores, lambda x: x.max(-1, keepdim=True))
    return value.squeeze(-1), place.squeeze(-1)


def _by_blocks(scores: Tensor, best: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """best: some largest and their places; those lie within the blocks with the largest maxima."""
    blocks = scores.view(*scores.shape[:-1], -1, BLOCK)
    chosen = best(blocks.amax(-1))[1]
    inside = blocks.gather(-2, chosen[..., None].expand(*chosen.shape, BLOCK))
    values, place = best(inside.flatten(-2))
    return values, chosen.gather(-1, place // BLOCK) * BLOCK + place % BLOCK


def logprobs_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities [...] in fp32 of tokens [...] under the softmax of logits [..., V], unfiltered."""
    logits = logits.float()
    return logits.gather(-1, tokens[..., None]).squeeze(-1) - logits.logsumexp(-1)
