"""Fused GPU kernels, one file each (docs/kernels.md), and the choice between them and torch.

Code that can use a kernel asks `kernel_for` for it, once per decoding where that is possible. Without one it calls
torch. Triton is not imported before a kernel is chosen.

A new kernel is its file, with the formula and `launch`; its name in `KERNELS`; its test against torch, with its case in
`launches`, in tests/kernels; and its case in specdec/lab/bench/formulas.py.

    name                 computes                                          in place of
    tree_attention       tree nodes over committed slots and each other    attention.attend under attention.tree_mask
    rms_norm             RMSNorm, and residual + RMSNorm                   layers.RMSNorm, layers.OffsetRMSNorm
    rope_write           norms of q and k, rotation, write to the cache    rope.rotate, cache.KVCache.write
    commit               accepted nodes' keys and values move down         cache.KVCache.commit
    gated                act(gate) * up                                    the middle of layers.GatedMLP
    head_topk            head, log-softmax and top-k without logits        a head, log_softmax and topk
    filtered_sampling    temperature, top-k, top-p, min-p and a draw       sampling.draws.sample
    norm_pair            two RMSNorms side by side                         specdec.drafters.layers.side_by_side
    tree_level           a level of a dynamic tree: scores and the best    specdec.trees.dynamic.next_level
    tree_select          the tree of a pool's best candidates              specdec.trees.dynamic.best_tree
"""

import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable

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


def use(backend: str, *names: str) -> None:
    """Choose the backend of the kernels `names`, or of all: 'triton', 'torch', or 'auto', which is Triton for tensors
    on a GPU and torch for others. Modules that are bound already (`layers.Freezable`) keep their backends.

    Raises ValueError for an unknown name, and for 'triton' if it is not installed."""
    if backend not in BACKENDS:
        raise ValueError(f"there is no backend {backend!r}; there are {', '.join(BACKENDS)}")
    for name in names:
        if name not in _backend:
            raise ValueError(f"there is no kernel {name!r}; there are {', '.join(KERNELS)}")
    if backend == "triton" and not installed():
        raise ValueError("triton is not installed; it comes with torch's CUDA builds, or with `pip install triton`")
    _backend.update(dict.fromkeys(names or KERNELS, backend))


def backends() -> tuple[str, ...]:
    """The backend of each kernel, in the order of `KERNELS`."""
    return tuple(_backend.values())


@functools.cache
def installed() -> bool:
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
