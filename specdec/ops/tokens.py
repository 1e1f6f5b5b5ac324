"""The largest of many numbers, and the likeliest token."""

import torch
from torch import Tensor

from specdec.ops import native

MANY = 512  # numbers among which Inductor looks for the largest in two loops


def largest(logits: Tensor) -> Tensor:
    """Return where the first of the largest of logits [...,V] is, [...]."""
    if native.serves(logits):
        return native.operator("largest")(logits)
    return logits.max(-1).indices  # the first of equals, as `argmax`, in a third of its time on the CPU


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probability of the likeliest token of logits [...,V], in fp32, and the token: [...,1] both."""
    if native.serves(logits):
        return native.operator("likeliest")(logits)
    return logits.float().log_softmax(-1).max(-1, keepdim=True)


@native.seen_as("aten.max.dim")
def _seen(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """One loop over the values, and another that looks for the first that equals the largest. Inductor's own loop
    carries the place along, which is ten times slower. With NaN among the numbers it gives the last place."""
    size = x.shape[dim]
    if x.device.type != "cpu" or size < MANY or dim not in (-1, x.ndim - 1) or not x.dtype.is_floating_point:
        return NotImplemented
    value = x.amax(-1, True)
    places = torch.arange(size, dtype=torch.int32, device=x.device)
    place = torch.where(x == value, places, size - 1).amin(-1, True).long()
    return (value, place) if keepdim else (value.squeeze(-1), place.squeeze(-1))
