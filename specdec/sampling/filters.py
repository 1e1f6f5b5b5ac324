"""The target's distribution after temperature and filters, and draws from it without synchronisation."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.ops import kernel_for
from specdec.ops.likely import first_largest
from specdec.sampling.noise import RoundNoise
from specdec.sampling_settings import PENALTIES
from specdec.structs import Sampling, SamplingBatch

# What the kernel knows; penalties are in the logits already.
IN_KERNEL = {"temperature", "top_k", "top_p", "min_p", *PENALTIES}


def settings_of(samplings: Sequence[Sampling], device: torch.device) -> Sampling | SamplingBatch:
    """Return the sampling that all rows of a batch share, or a table with one per row."""
    return samplings[0] if len(set(samplings)) == 1 else SamplingBatch(samplings, device)


def filtered_probs(logits: Tensor, sampling: Sampling | SamplingBatch) -> Tensor:
    """Return probabilities [..., V] in fp32 after temperature, top-k, top-p and min-p, in this order.

    Penalties are applied to the logits [..., V] before (`penalties.Penalties`).

    The filters equal transformers' logits warpers: top-k keeps ties of the k-th logit; top-p keeps the smallest set of
    most likely tokens whose mass reaches p; min-p keeps tokens of at least min_p times the most likely one's
    probability. At temperature 0 the most likely token has all the probability.
    """
    if isinstance(sampling, Sampling) and sampling.greedy:
        return _certain(logits)
    probs = filtered_scores(logits, sampling).softmax(-1)
    if isinstance(sampling, SamplingBatch):
        probs = torch.where(_column(sampling.greedy, logits), _certain(logits), probs)
    return probs


def warmed(logits: Tensor, sampling: Sampling | SamplingBatch, share: float = 1.0) -> Tensor:
    """Return logits [..., V] times share over the temperature, in fp32; unchanged at temperature 0."""
    if isinstance(sampling, SamplingBatch):
        divisor = torch.where(sampling.greedy, 1.0, sampling.temperature / share)
        return logits.float() / _column(divisor, logits)
    return logits.float() if sampling.greedy else logits.float() / (sampling.temperature / share)


def filtered_scores(logits: Tensor, sampling: Sampling | SamplingBatch) -> Tensor:
    """Return the logs of `filtered_probs` up to a constant per row, -inf for dropped tokens; the logits if greedy."""
    if isinstance(sampling, SamplingBatch):
        return _scores_by_row(logits, sampling)
    scores = warmed(logits, sampling)
    if sampling.greedy:
        return scores
    if 0 < sampling.top_k < scores.shape[-1]:
        scores = scores.masked_fill(scores < scores.topk(sampling.top_k).values[..., -1:], -torch.inf)
    if sampling.top_p < 1:
        ascending, order = scores.sort(dim=-1)
        drop = ascending.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        drop[..., -1] = False
        scores = scores.masked_fill(drop.scatter(-1, order, drop), -torch.inf)
    if sampling.min_p > 0:
        probs = scores.softmax(-1)
        scores = scores.masked_fill(probs < sampling.min_p * probs.amax(-1, keepdim=True), -torch.inf)
    return scores


def _column(values: Tensor, like: Tensor) -> Tensor:
    """Return values [B] in a shape that broadcasts with [B, ..., V]."""
    return values.view(-1, *[1] * (like.ndim - 1))


def _scores_by_row(logits: Tensor, sampling: SamplingBatch) -> Tensor:
    """Return `filtered_scores` for rows that differ, logits [B, ..., V]. Filters that are off drop no token above 0."""
    vocab = logits.shape[-1]
    scores = warmed(logits, sampling)
    if sampling.any_cut:
        ascending, order = scores.sort(dim=-1)
        top_k = torch.where(sampling.top_k == 0, vocab, sampling.top_k.clamp(max=vocab))
        least = ascending.gather(-1, _column(vocab - top_k, logits).expand(*scores.shape[:-1], 1))
        ascending = ascending.masked_fill(ascending < least, -torch.inf)
        drop = ascending.softmax(-1).cumsum(-1) <= _column(sampling.tail, logits)
        drop[..., -1] = False
        scores = scores.masked_fill(drop.scatter(-1, order, drop), -torch.inf)
    if sampling.any_min_p:
        probs = scores.softmax(-1)
        least = _column(sampling.min_p, logits) * probs.amax(-1, keepdim=True)
        scores = scores.masked_fill(probs < least, -torch.inf)
    return scores


def _certain(logits: Tensor) -> Tensor:
    """Return probability 1 for the most likely token."""
    best = logits.max(-1, keepdim=True).indices
    return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, best, 1.0)


def draw(probs: Tensor, gumbel: Tensor) -> Tensor:
    """Draw one token per row: probs [...,V], not necessarily normalised, and Gumbel noise of that shape -> [...] int64.

    The largest log p + G is a draw from p (Gumbel 1954), the k largest are k draws without replacement in order.
    """
    return (probs.log() + gumbel).max(-1).indices


def sample(
    logits: Tensor, sampling: Sampling | SamplingBatch, noise: RoundNoise | None, depth: Tensor | None = None
) -> Tensor:
    """Draw the token after each node: logits [B,N,V] of nodes of depth [B,N], or one of each depth -> [B,N] int64."""
    if isinstance(sampling, Sampling) and sampling.greedy:
        return first_largest(logits)
    if noise is None:
        raise ValueError("above temperature 0 a token is drawn by noise")
    shared = sampling if isinstance(sampling, Sampling) and sampling.active <= IN_KERNEL else None
    if shared and (kernel := kernel_for("filtered_sampling", logits)):
        filters = shared.temperature, shared.top_k, shared.top_p, shared.min_p
        return kernel(logits.flatten(0, 1), *filters, noise.keys_at(depth).flatten(0, 1))[0].view(logits.shape[:-1])
    return perturbed(filtered_scores(logits, sampling), sampling, noise.at(depth)).max(-1).indices


def perturbed(scores: Tensor, sampling: Sampling | SamplingBatch, gumbel: Tensor) -> Tensor:
    """Add noise that broadcasts with scores [B,...,V]; rows of temperature 0 get no noise."""
    if isinstance(sampling, SamplingBatch):
        gumbel = gumbel.masked_fill(sampling.greedy.view(-1, *[1] * (gumbel.ndim - 1)), 0.0)
    return scores + gumbel
