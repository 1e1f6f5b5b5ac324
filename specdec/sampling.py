"""The target's filtered distribution, draws from it, and log-probabilities before any filter."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec.kernels import kernel_for
from specdec.types import Sampling, Samplings

BLOCK, MANY = 64, 8192  # of `top` and `largest`, on the CPU


def settings_of(samplings: Sequence[Sampling], device: torch.device) -> Sampling | Samplings:
    """The settings of a batch's rows: the one that all share, or a table."""
    return samplings[0] if len(set(samplings)) == 1 else Samplings(samplings, device)


def filtered_probs(logits: Tensor, sampling: Sampling | Samplings) -> Tensor:
    """logits [..., V] -> probabilities [..., V] in fp32 after temperature, top-k, top-p and min-p, in this order.
    Penalties are not applied here but before (`penalties.Penalties`).

    Filters as transformers' logits warpers do: top-k keeps ties of the k-th logit; top-p keeps the smallest set of most
    likely tokens whose mass reaches p; min-p keeps tokens of at least min_p times the most likely one's probability.
    At temperature 0 the most likely token has all the probability.
    """
    if isinstance(sampling, Samplings):
        return _filtered_by_row(logits, sampling)
    if sampling.greedy:
        return _certain(logits)
    scores = logits.float() / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        scores = scores.masked_fill(scores < scores.topk(sampling.top_k).values[..., -1:], -torch.inf)
    if sampling.top_p < 1:
        ascending, order = scores.sort(dim=-1)
        drop = ascending.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        drop[..., -1] = False
        scores = scores.masked_fill(drop.scatter(-1, order, drop), -torch.inf)
    probs = scores.softmax(-1)
    if sampling.min_p > 0:
        probs = probs.masked_fill(probs < sampling.min_p * probs.amax(-1, keepdim=True), 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def _filtered_by_row(logits: Tensor, sampling: Samplings) -> Tensor:
    """The same for rows that differ, logits [B, ..., V]: what is off in a row is there a filter that drops nothing."""

    def column(values: Tensor) -> Tensor:
        return values.view(-1, *[1] * (logits.ndim - 1))

    vocab = logits.shape[-1]
    scores = logits.float() / column(sampling.temperature)
    if sampling.any_cut:
        ascending, order = scores.sort(dim=-1)
        top_k = torch.where(sampling.top_k == 0, vocab, sampling.top_k.clamp(max=vocab))
        least = ascending.gather(-1, column(vocab - top_k).expand(*scores.shape[:-1], 1))
        ascending = ascending.masked_fill(ascending < least, -torch.inf)
        drop = ascending.softmax(-1).cumsum(-1) <= column(sampling.tail)
        drop[..., -1] = False
        scores = scores.masked_fill(drop.scatter(-1, order, drop), -torch.inf)
    probs = scores.softmax(-1)
    if sampling.any_min_p:
        probs = probs.masked_fill(probs < column(sampling.min_p) * probs.amax(-1, keepdim=True), 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
    return torch.where(column(sampling.greedy), _certain(logits), probs)


def _certain(logits: Tensor) -> Tensor:
    """All probability to the most likely token."""
    best = logits.max(-1, keepdim=True).indices
    return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, best, 1.0)


def race(probs: Tensor, generator: torch.Generator | None) -> Tensor:
    """probs [..., V], not necessarily normalised -> p / e with e ~ Exp(1), of the same shape.

    An exponential race: the largest is a draw from p, the k largest are k draws without replacement in order. Unlike
    `multinomial` it does not synchronise.
    """
    return probs / torch.empty_like(probs).exponential_(generator=generator)


def draw(probs: Tensor, generator: torch.Generator | None) -> Tensor:
    """One token per row: probs [..., V], not necessarily normalised -> [...] int64."""
    return race(probs, generator).max(-1).indices


def sample(logits: Tensor, sampling: Sampling | Samplings, generator: torch.Generator | None) -> Tensor:
    """One token per row: logits [..., V] -> [...] int64."""
    if isinstance(sampling, Samplings):
        return draw(filtered_probs(logits, sampling), generator)
    if sampling.greedy:
        return logits.max(-1).indices  # the first of equals, as `argmax`, in a third of its time on the CPU
    if kernel := kernel_for("filtered_sampling", logits):
        filters = sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
        return kernel(logits.flatten(0, -2), *filters, generator)[0].view(logits.shape[:-1])
    return draw(filtered_probs(logits, sampling), generator)


def likeliest(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """logits [..., V] -> log-probabilities and ids [..., k] of the k most likely tokens, best first, in fp32."""
    return top(logits.float().log_softmax(-1), k)


def top(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of scores [..., V], best first, and their places.

    torch's `topk` on the CPU handles every element as a pair of value and place. Of many it is quicker to look for them
    in a few blocks (docs/log.md).
    """
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
