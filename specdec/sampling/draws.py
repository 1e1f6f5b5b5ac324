"""Draws from a distribution without synchronisation."""

import torch
from torch import Tensor

from specdec.kernels import kernel_for
from specdec.sampling.filters import filtered_probs
from specdec.types import PENALTIES, Sampling, SamplingBatch

# What the kernel knows; penalties are in the logits already.
IN_KERNEL = {"temperature", "top_k", "top_p", "min_p", *PENALTIES}


def race(probs: Tensor, generator: torch.Generator | None) -> Tensor:
    """probs [..., V], not necessarily normalised -> p / e with e ~ Exp(1), of the same shape.

    An exponential race: the largest is a draw from p, the k largest are k draws without replacement in order. Unlike
    `multinomial` it does not synchronise.
    """
    return probs / torch.empty_like(probs).exponential_(generator=generator)


def draw(probs: Tensor, generator: torch.Generator | None) -> Tensor:
    """One token per row: probs [..., V], not necessarily normalised -> [...] int64."""
    return race(probs, generator).max(-1).indices


def sample(logits: Tensor, sampling: Sampling | SamplingBatch, generator: torch.Generator | None) -> Tensor:
    """One token per row: logits [..., V] -> [...] int64."""
    if isinstance(sampling, SamplingBatch):
        return draw(filtered_probs(logits, sampling), generator)
    if sampling.greedy:
        return logits.max(-1).indices  # the first of equals, as `argmax`, in a third of its time on the CPU
    if sampling.active <= IN_KERNEL and (kernel := kernel_for("filtered_sampling", logits)):
        filters = sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
        return kernel(logits.flatten(0, -2), *filters, generator)[0].view(logits.shape[:-1])
    return draw(filtered_probs(logits, sampling), generator)
