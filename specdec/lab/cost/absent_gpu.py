"""A GPU that is not there: code runs on tensors that say they are on it, and hold nothing.

Shapes, dtypes and devices are those of a GPU, so the code takes the paths that it takes on one, its Triton kernels
among them, at any size of model and in no memory. No value is computed. It serves to count what would be launched. What
kept tensors there, such as a model or a tree policy, is of no use afterwards.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten
PROCESSORS = 132  # of an H100 or an H200


class _NoDevice(TorchFunctionMode):
    """A tensor that holds nothing has no address; what keeps addresses for a kernel gets 0. A few methods ask for the
    device before they reach an operator, so the operators are called in their place."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.data_ptr:
            return 0
        if func in (Tensor.__invert__, Tensor.copy_):
            return (aten.bitwise_not if func is Tensor.__invert__ else aten.copy_)(*args, **(kwargs or {}))
        if func is Tensor.contiguous:
            return args[0] if args[0].is_contiguous() else args[0].clone(memory_format=torch.contiguous_format)
        if func is Tensor.__getitem__:
            return _indexed(*args)
        if func is Tensor.__setitem__:
            x, index, value = args
            part = _indexed(x, index)
            return (aten.copy_ if isinstance(value, Tensor) else aten.fill_)(part, value)
        return func(*args, **(kwargs or {}))


def _zeros(shape: torch.Size) -> list | int:
    """What is read of a tensor of this shape."""
    return [_zeros(shape[1:]) for _ in range(shape[0])] if shape else 0


def _indexed(x: Tensor, index) -> Tensor:
    """x[index], for numbers, slices, None, `...` and tensors of numbers."""
    index = index if isinstance(index, tuple) else (index,)
    if any(i is ... for i in index):
        at = next(place for place, i in enumerate(index) if i is ...)
        given = sum(i is not None for i in index) - 1
        index = (*index[:at], *[slice(None)] * (x.ndim - given), *index[at + 1 :])
    dim, tensors = 0, {}
    for i in index:
        if i is None:
            x = x.unsqueeze(dim)
        elif isinstance(i, slice):
            x = aten.slice(x, dim, i.start, i.stop, i.step or 1)
        elif isinstance(i, Tensor):
            tensors[dim] = i
        else:
            x = x.select(dim, i)
            continue
        dim += 1
    return aten.index(x, [tensors.get(d) for d in range(max(tensors) + 1)]) if tensors else x


class _NoValues(TorchDispatchMode):
    """Random numbers need a generator of the device; nobody looks at them, so they are not drawn. Tensors that were
    made of values on the host forget these, which cannot be copied to the device."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self.fake = fake

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(Tensor, self._forget, (args, kwargs or {}))
        if func.__name__.split(".")[0] in ("uniform_", "normal_", "exponential_"):
            return args[0]
        return func(*args, **kwargs)

    def _forget(self, x: Tensor) -> Tensor:
        if not isinstance(x, FakeTensor):
            return self.fake.from_tensor(x)
        x.constant = None
        return x


def _apply(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """In the place of `nn.Module._apply`, which wants to keep a parameter's identity and cannot do so here."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = nn.Parameter(change(parameter), parameter.requires_grad)
        for name, buffer in part._buffers.items():
            part._buffers[name] = buffer if buffer is None else change(buffer)
    return module


@contextmanager
def absent_gpu(launched: Callable[[str], None] = lambda name: None) -> Iterator[torch.device]:
    """The device, within whose `with` no tensor holds anything. `launched` is told the name of each Triton kernel."""
    with ExitStack() as stack:
        for function in _launchers():
            stack.enter_context(patch.object(function, "run", _reporting(launched)))
        if not torch.cuda.is_available():
            properties = SimpleNamespace(multi_processor_count=PROCESSORS)
            stack.enter_context(patch.object(torch.cuda, "get_device_properties", lambda device: properties))
        stack.enter_context(patch.object(nn.Module, "_apply", _apply))
        stack.enter_context(patch.object(FakeTensor, "tolist", lambda x: _zeros(x.shape)))
        fake = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_NoValues(fake))
        stack.enter_context(_NoDevice())
        yield torch.device("cuda", 0)


def _launchers() -> list[type]:
    """The classes whose `run` launches a Triton kernel; none without Triton, where torch is what a GPU would run."""
    try:
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import JITFunction
    except ImportError:
        return []
    return [JITFunction, InterpretedFunction]


def _reporting(launched: Callable[[str], None]) -> Callable:
    def run(self, *args, grid, warmup, **options):
        launched(self.fn.__name__.strip("_"))

    return run
