"""Operators, one file each: what CUDA, a CPU with and without a C++ compiler, and Inductor run for it.

A file offers a function that binds an operator to weights, once per decoding, and returns a plain function: a Triton
kernel (`cuda/`, docs/kernels.md), an operator in C++ (`cpu/`, by `native`), or torch's operators, which are the
reference. `kernel_for` chooses between Triton and the others. What Inductor sees of an operator in C++ is registered by
`native.seen_as`.
"""

import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

KERNELS = (
    "tree_attention", "rms_norm", "rope_write", "commit", "gated", "head_topk", "filtered_sampling", "norm_pair",
    "tree_level", "tree_select",
)  # fmt: skip
BACKENDS = ("auto", "torch", "triton")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_LIKELY = 32  # the largest k of `head_topk`; for each of the best its merge passes over all candidates

_backend = dict.fromkeys(KERNELS, "auto")


class Norm(Protocol):
    """The attributes of an RMSNorm module that operators read."""

    eps: float
    offset: bool
    weight: Tensor  # as stored, [H]

    def gain(self) -> Tensor:
        """Return the factors that the normed values are multiplied by: the weight, plus 1 with `offset`."""

    def bind(self) -> Callable[..., Any]:
        """Return the norm as a plain function."""


class Matrix(Protocol):
    """The attributes of a linear module that operators read."""

    in_features: int
    out_features: int
    int8: bool  # the weight may be rounded
    weight: Tensor
    bias: Tensor | None


class Head(Protocol):
    """Module that makes logits of hidden states: a linear module, or several whose logits are added."""

    @property
    def bias(self) -> Tensor | None:
        """The bias of the logits, or None."""

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """The weights [V,H] whose products are added."""

    def __call__(self, hidden: Tensor, /) -> Tensor:
        """Return the logits [...,V] of hidden states [...,H]."""


def use(backend: str, *names: str) -> None:
    """Choose the backend of the kernels `names`, or of all; ValueError for unknown names, or if Triton is missing.

    'auto' is Triton for tensors on a GPU and torch for others. Modules that are bound already (`layers.Freezable`) keep
    their backends.
    """
    if backend not in BACKENDS:
        raise ValueError(f"there is no backend {backend!r}; there are {', '.join(BACKENDS)}")
    for name in names:
        if name not in _backend:
            raise ValueError(f"there is no kernel {name!r}; there are {', '.join(KERNELS)}")
    if backend == "triton" and not installed():
        raise ValueError("triton is not installed; it comes with torch's CUDA builds, or with `pip install triton`")
    _backend.update(dict.fromkeys(names or KERNELS, backend))


def backends() -> tuple[str, ...]:
    """Return the backend of each kernel, in the order of `KERNELS`."""
    return tuple(_backend.values())


@functools.cache
def installed() -> bool:
    """Return whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def kernel_for(name: str, like: Tensor) -> Callable | None:
    """The `launch` of the kernel `name` if tensors such as `like` take it, else None.

    Kernels have no backward pass and no mixed dtypes, so under autograd and autocast the answer is None. On CPU tensors
    a kernel runs in Triton's interpreter, for tests: 'triton' must have been chosen, and TRITON_INTERPRET=1 be set.
    """
    backend = _backend[name]
    if backend == "torch" or not (like.is_cuda or backend == "triton"):
        return None
    if torch.is_grad_enabled() or torch.is_autocast_enabled(like.device.type) or like.dtype not in DTYPES:
        return None
    if not installed():
        _say_that_triton_is_missing()
        return None
    return _load(name, like.is_cuda)


@functools.cache
def _say_that_triton_is_missing() -> None:
    warnings.warn("triton is not installed: decoding takes plain PyTorch, which is slower", stacklevel=3)


@functools.cache
def _load(name: str, on_gpu: bool) -> Callable:
    from triton import knobs

    if not on_gpu and not knobs.runtime.interpret:
        raise ValueError("Triton kernels need a GPU; on CPU tensors they run with TRITON_INTERPRET=1 only")
    return importlib.import_module(f"specdec.ops.cuda.{name}").launch
