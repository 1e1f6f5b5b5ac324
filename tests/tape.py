"""A CUDA graph without a GPU: operators are recorded while a function runs, and replayed on the same memory.

A replay runs no Python of the function, and every tensor keeps its address. Like a graph, a tape holds no tensor that
it has not made itself: a replay after one of the others is gone is an error.
"""

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from specdec.engine.compiled.graph import record
from specdec.engine.compiled.rounds import CompiledRounds
from specdec.engine.executor import restored
from specdec.engine.graphs import WARM_UPS

# Their results, or the shapes of these, must be known on the host.
BLOCKING = (
    "_local_scalar_dense", "nonzero", "masked_select", "item", "equal", "is_nonzero", "_unique2", "unique_dim",
)  # fmt: skip


class NoHostSync(TorchDispatchMode):
    """Raises for operators that would wait for a device, and for tensors made of values from the host."""

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


def tensors(value) -> list[Tensor]:
    leaves = tree_flatten(value)[0]
    return [x for x in leaves if isinstance(x, Tensor) and x.layout is torch.strided]  # weights may be packed otherwise


def again(func, args, kwargs, out) -> None:
    """Run a recorded operator, its results to where they were."""
    inputs = {x.untyped_storage().data_ptr() for x in tensors((args, kwargs))}
    views = [bool(x.numel()) and x.untyped_storage().data_ptr() in inputs for x in tensors(out)]
    if views and all(views) and not func._schema.is_mutable:
        return  # nothing to do
    for x, new, view in zip(tensors(out), tensors(func(*args, **kwargs)), views, strict=True):
        if not view:
            x.copy_(new)


class Borrowed:
    """A tensor that a tape reads or writes and does not hold."""

    def __init__(self, x: Tensor):
        self.storage, self.dtype = StorageWeakRef(x.untyped_storage()), x.dtype
        self.place = x.storage_offset(), x.shape, x.stride()

    def __call__(self) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            raise AssertionError(f"a replay uses a tensor that nobody holds any more, of shape {tuple(self.place[1])}")
        return torch.empty(0, dtype=self.dtype).set_(storage, *self.place)


def let_go(calls: list[tuple]) -> list[tuple]:
    """The calls of a record with all tensors `Borrowed` whose memory was there before."""
    own = set()
    for func, args, kwargs, out in calls:
        # What is lifted is a number that torch has made a tensor of, for an assignment.
        given = [] if func is torch.ops.aten.lift_fresh.default else tensors((args, kwargs))
        own |= {x.untyped_storage()._cdata for x in tensors(out)} - {x.untyped_storage()._cdata for x in given}

    def borrow(value):
        ours = not tensors(value) or value.untyped_storage()._cdata in own
        return value if ours else Borrowed(value)

    return [(call[0], *tree_map(borrow, call[1:])) for call in calls]


def live_bytes(objects: list) -> int:
    """Return the bytes of the tensors among all objects of a process, without packed weights."""
    found = [x for x in objects if type(x) in (Tensor, torch.nn.Parameter) and x.layout == torch.strided]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in found}.values())


class Tape:
    """An executor for tests."""

    any_bound, late = False, True

    def __init__(self):
        self.captures, self.rows = 0, []  # rows: of each replay

    def forget(self):
        pass

    def capture(self, run, preserved, bound):
        with restored(preserved):
            for _ in range(WARM_UPS):
                run(bound)
        with restored(preserved), NoHostSync():  # a capture only records: what running did is undone
            noted = record(run, bound)
        self.captures += 1
        rows, made, calls = len(preserved[0]), noted.made, let_go([tuple(vars(call).values()) for call in noted.calls])

        def replay(_):
            self.rows.append(rows)
            for call in calls:
                again(*tree_map(lambda value: value() if isinstance(value, Borrowed) else value, call))
            return made

        return replay


class Interpreted(CompiledRounds):
    """An executor for tests: the graphs that would be compiled, which torch runs operator by operator. Weights
    must not be packed (`cpu_linear.pack`): packed ones are inputs of operators of `native.cpp` only."""

    def __init__(self):
        self.made, self.workshop = [], None

    @property
    def captures(self) -> int:
        return len(self.made)

    def compile(self, graph):
        self.made.append(graph)
        return lambda inputs: list(graph.module(*inputs))
