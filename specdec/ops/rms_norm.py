"""RMSNorm: of one input, of a sum, and of two inputs side by side (formula: `cuda/rms_norm.py`).

The statistics are in fp32, or finer, as in transformers.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specdec.ops import Norm, kernel_for, native


def rms_norm(weight: Tensor, eps: float, offset: bool = False) -> Callable[..., Any]:
    """Return a function. Of x [...,H] it gives the norm, and of x and a residual their sum and the norm of that."""
    if kernel := kernel_for("rms_norm", weight):
        return lambda x, residual=None: kernel(x, weight, eps, offset, residual)
    if not offset and native.serves(weight):
        one, add = native.operator("rms_norm"), native.operator("add_norm")
        return lambda x, residual=None: one(x, weight, eps) if residual is None else add(residual, x, weight, eps)
    plain = reference(weight, eps, offset)

    def norm(x: Tensor, residual: Tensor | None = None) -> Any:
        if residual is None:
            return plain(x)
        total = residual + x
        return total, plain(total)

    return norm


def norm_pair(first: Norm, second: Norm) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function of x and y [...,H] that gives their norms side by side [...,2H]. Both are of one kind."""
    weights, eps, offset = (first.weight, second.weight), (first.eps, second.eps), first.offset
    if not offset and (kernel := kernel_for("norm_pair", first.weight)):
        return lambda x, y: kernel(x, y, weights, eps)
    if not offset and native.serves(first.weight) and native.serves(second.weight):
        pair = native.operator("norm_pair")
        return lambda x, y: pair(x, y, *weights, *eps)
    of_x, of_y = (reference(each.weight, each.eps, offset) for each in (first, second))
    return lambda x, y: torch.cat([of_x(x), of_y(y)], dim=-1)


def reference(weight: Tensor, eps: float, offset: bool = False) -> Callable[[Tensor], Tensor]:
    """Return the norm in torch's operators."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    device, share = weight.device, 1 / len(weight)
    # On a GPU it is filled there, each time: a copy would synchronise, and a cached one might belong to a CUDA graph.
    epsilon = _constant(eps, wide) if device.type == "cpu" else torch.full((), eps, dtype=wide, device=device)

    def normalise(x: Tensor) -> Tensor:
        x = x.to(wide)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # fewer operators than `F.rms_norm` on the CPU
        return x * torch.addcmul(epsilon, length, length, value=share).rsqrt_()

    if offset:
        gain = 1 + weight.float()
        return lambda x: (normalise(x) * gain).to(x.dtype)
    return lambda x: normalise(x).to(x.dtype) * weight


@functools.cache
def _constant(value: float, dtype: torch.dtype) -> Tensor:
    """Return a scalar tensor on the CPU, made once and usable by autograd, even if first made in inference mode."""
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=dtype)


@native.seen_as("specdec_rows.rms_norm.default")
def seen_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute the norm in operators that Inductor compiles."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * (length * length * (1 / x.shape[-1]) + eps).rsqrt() * weight


@native.seen_as("specdec_rows.add_norm.default")
def _seen_add(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + y
    return total, seen_norm(total, weight, eps)


@native.seen_as("specdec_rows.norm_pair.default")
def _seen_pair(x: Tensor, y: Tensor, x_weight: Tensor, y_weight: Tensor, x_eps: float, y_eps: float) -> Tensor:
    return torch.cat([seen_norm(x, x_weight, x_eps), seen_norm(y, y_weight, y_eps)], dim=-1)
