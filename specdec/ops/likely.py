"""The most likely tokens, of a head's hidden states or of logits, and log-probabilities before any filter."""

from collections.abc import Callable

import torch
from torch import Tensor

from specdec.ops import MOST_LIKELY, Head, kernel_for, native

BLOCK, MANY = 64, 8192  # of `top` and `largest`, on the CPU
LOOPS = 512  # numbers among which Inductor looks for the largest in two loops


def head_topk(hidden: Tensor, head: Head | None, k: int) -> tuple[Tensor, Tensor]:
    """Return log-probabilities (fp32) and ids [B,W,k] of the k most likely tokens, best first.

    hidden [B,W,H]: the head's input, or the logits themselves if there is no head.
    """
    if head is not None and head.bias is None and k <= MOST_LIKELY:
        kernel = kernel_for("head_topk", hidden)
        weight, *others = head.weights
        if kernel is not None and not others and weight.dtype == hidden.dtype:
            logp, ids = kernel(hidden.flatten(0, 1), weight, k)
            return logp.view(*hidden.shape[:2], k), ids.view(*hidden.shape[:2], k)
    return top_logprobs(hidden if head is None else head(hidden), k)


def top_logprobs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return log-probabilities, fp32, and ids [..., k] of the k most likely tokens of logits [..., V], best first."""
    if k == 1 and native.serves(logits):
        return native.operator("likeliest")(logits)
    return top(logits.float().log_softmax(-1), k)


def first_largest(logits: Tensor) -> Tensor:
    """Return where the first of the largest of logits [..., V] is, [...]."""
    if native.serves(logits):
        return native.operator("largest")(logits)
    return logits.max(-1).indices  # the first of equals, as `argmax`, in a third of its time on the CPU


@native.seen_as("aten.max.dim")
def _seen(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Find the largest values in one loop, and in another the first place that equals each.

    Inductor's own loop carries the place along, which is ten times slower. With NaN among the numbers this gives the
    last place.
    """
    size = x.shape[dim]
    if x.device.type != "cpu" or size < LOOPS or dim not in (-1, x.ndim - 1) or not x.dtype.is_floating_point:
        return NotImplemented
    value = x.amax(-1, True)
    places = torch.arange(size, dtype=torch.int32, device=x.device)
    place = torch.where(x == value, places, size - 1).amin(-1, True).long()
    return (value, place) if keepdim else (value.squeeze(-1), place.squeeze(-1))


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
    """Return scores.max(-1). On the CPU a maximum takes a tenth of the time if its place is not asked for."""
    if scores.device.type != "cpu" or scores.shape[-1] % BLOCK:
        return scores.max(-1)
    value, place = _by_blocks(scores, lambda x: x.max(-1, keepdim=True))
    return value.squeeze(-1), place.squeeze(-1)


def _by_blocks(scores: Tensor, best: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """best: finds the largest scores and their places, which are in the blocks with the largest maxima."""
    blocks = scores.view(*scores.shape[:-1], -1, BLOCK)
    chosen = best(blocks.amax(-1))[1]
    inside = blocks.gather(-2, chosen[..., None].expand(*chosen.shape, BLOCK))
    values, place = best(inside.flatten(-2))
    return values, chosen.gather(-1, place // BLOCK) * BLOCK + place % BLOCK


def logprobs_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return log-probabilities [...], fp32, of tokens [...] under the softmax of logits [..., V], unfiltered."""
    logits = logits.float()
    return logits.gather(-1, tokens[..., None]).squeeze(-1) - logits.logsumexp(-1)
