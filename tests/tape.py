"""A CUDA graph without a GPU: operators are recorded while a function runs, and run again on the same memory.

As with a graph, no Python of the function runs again, what it knew on the host is what it knew then, and every tensor
lies where it lay: a result that is kept outside static tensors is not seen by the next run.
"""

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from specdec.engine.graphs import WARM_UPS

# Their results, or the shapes of these, must be known on the host.
BLOCKING = (
    "_local_scalar_dense", "nonzero", "masked_select", "item", "equal", "is_nonzero", "_unique2", "unique_dim",
)  # fmt: skip


class NoHostSync(TorchDispatchMode):
    """What would wait for a device is an error: operators, and tensors made of values from the host."""

    def __enter__(self):
        self.made_on_host = torch.tensor, torch.as_tensor
        torch.tensor = torch.as_tensor = forbidden
        return super().__enter__()

    def __exit__(self, *error):
        torch.tensor, torch.as_tensor = self.made_on_host
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        boolean_index = name in ("index", "index_put", "index_put_") and any(
            i is not None and i.dtype == torch.bool for i in args[1]
        )
        if name in BLOCKING or boolean_index:
            raise AssertionError(f"host synchronisation inside a round: {func}")
        return func(*args, **(kwargs or {}))


def forbidden(*args, **kwargs):
    raise AssertionError("host synchronisation inside a round: torch.tensor copies from the host")


class Recorder(NoHostSync):
    """Notes every operator with its arguments and what it gave."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.calls.append((func, args, kwargs or {}, out))
        return out


def tensors(value) -> list[Tensor]:
    leaves = tree_flatten(value)[0]
    return [x for x in leaves if isinstance(x, Tensor) and x.layout is torch.strided]  # weights may be packed otherwise


def again(func, args, kwargs, out) -> None:
    """Run a recorded operator, its results to where they were."""
    inputs = {x.untyped_storage().data_ptr() for x in tensors((args, kwargs))}
    results = tensors(out)
    if func._schema.is_mutable:
        func(*args, **kwargs)
    elif not all(x.numel() and x.untyped_storage().data_ptr() in inputs for x in results):  # else views: nothing to do
        for x, new in zip(results, tensors(func(*args, **kwargs)), strict=True):
            x.copy_(new)


class Tape:
    """A `graphs.Backend` for tests."""

    def __init__(self):
        self.generator = torch.Generator()
        self.captures, self.replays = 0, 0

    def forget(self):
        pass

    def capture(self, run, kept):
        before, numbers = [x.clone() for x in kept], self.generator.get_state()
        for _ in range(WARM_UPS):
            run()
        for x, old in zip(kept, before, strict=True):
            x.copy_(old)
        self.generator.set_state(numbers)
        with Recorder() as record:
            made = run()
        # A capture only records: what running did is undone.
        for x, old in zip(kept, before, strict=True):
            x.copy_(old)
        self.generator.set_state(numbers)
        self.captures += 1

        def replay():
            self.replays += 1
            for call in record.calls:
                again(*call)
            return made

        return replay
