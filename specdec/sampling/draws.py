"""Draws from a distribution, with a row's noise and without synchronisation."""

from torch import Tensor

from specdec.ops import kernel_for
from specdec.ops.likely import first_largest
from specdec.sampling.filters import filtered_scores
from specdec.sampling.noise import RoundNoise
from specdec.sampling_settings import PENALTIES
from specdec.structs import Sampling, SamplingBatch

# What the kernel knows; penalties are in the logits already.
IN_KERNEL = {"temperature", "top_k", "top_p", "min_p", *PENALTIES}


def draw(probs: Tensor, gumbel: Tensor) -> Tensor:
    """Draw one token per row: probs [...,V], not necessarily normalised, and Gumbel noise of that shape -> [...] int64.

    The largest log p + G is a draw from p (Gumbel 1954), the k largest are k draws without replacement in order.
    """
    return (probs.log() + gumbel).max(-1).indices


def sample(
    logits: Tensor, sampling: Sampling | SamplingBatch, noise: RoundNoise | None, depth: Tensor | None = None
) -> Tensor:
    """Draw the token after each node: logits [B,N,V] of nodes of depth [B,N] -> [B,N] int64.

    Without depth, there is one node of each depth. noise: not needed at temperature 0.
    """
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
