"""Compiles graphs in another process, while rounds continue.

That process has the lowest priority. It may outlive its parent, and the next process finds its result in the cache.
"""

import copyreg
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from specdec.cli.errors import one_sentence_errors
from specdec.engine.compiled import build
from specdec.engine.compiled.graph import RoundGraph
from specdec.ops import native
from specdec.threads import full_threads


@dataclass(frozen=True)
class Place:
    """Placeholder for a node of a graph that is written down."""

    number: int


@dataclass(frozen=True)
class Shape:
    """Properties of an input that the compiler reads."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def stride(self) -> tuple[int, ...]:
        """Return the strides, as `Tensor.stride` does."""
        return self.strides

    def __len__(self) -> int:
        """Return the size of the first dimension."""
        return self.shape[0]

    @classmethod
    def of(cls, x: Tensor) -> "Shape":
        """Return the shape, strides, dtype and device of a tensor."""
        return cls(tuple(x.shape), x.stride(), x.dtype, x.device)


def written(graph: RoundGraph) -> tuple[list[tuple], list[Shape]]:
    """Return a graph without its tensors, as objects that can be pickled."""
    numbers: dict[fx.Node, Any] = {node: Place(i) for i, node in enumerate(graph.module.graph.nodes)}
    nodes = [
        (node.op, node.target, *fx.node.map_arg((node.args, node.kwargs), numbers.__getitem__))
        for node in graph.module.graph.nodes
    ]
    return nodes, [Shape.of(x) for x in graph.inputs]


def read(nodes: list[tuple], inputs: list[Shape]) -> RoundGraph:
    """Invert `written`. The graph can be compiled, but not run."""
    graph, made = fx.Graph(), []
    for op, target, *given in nodes:
        args, kwargs = fx.node.map_aggregate(given, lambda x: made[x.number] if isinstance(x, Place) else x)
        made.append(graph.create_node(op, target, args, kwargs))
    shapes: Any = inputs  # which say of tensors what a compiler asks
    return RoundGraph(fx.GraphModule(torch.nn.Module(), graph), shapes, [], None)


def _operator(name: str, overload: str) -> torch._ops.OpOverload:
    """Return an operator of torch, such as aten::add.Tensor, by its pickled name."""
    space, _, packet = name.partition("::")
    return getattr(getattr(getattr(torch.ops, space), packet), overload)


copyreg.pickle(torch._ops.OpOverload, lambda op: (_operator, (op._schema.name, op._overloadname)))


@dataclass(eq=False)
class Order:
    """A graph that is to be compiled."""

    graph: tuple  # as `written`
    library: Path
    wanted: int = 0  # rounds that had to do without it
    over: bool = False  # it is there, or never will be


class Work:
    """A process that compiles."""

    def __init__(self, order: Order):
        """Start the process that compiles the graph of an order."""
        self.order, self.begun = order, time.perf_counter()
        self.said = tempfile.TemporaryFile()  # noqa: SIM115 - a pipe would have to be read
        with tempfile.TemporaryFile() as asked:  # a pipe would wait for the reader
            pickle.dump((order.graph, str(order.library), full_threads()), asked)
            asked.seek(0)
            self.process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import main; main()"],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
                stdin=asked,
                stdout=subprocess.DEVNULL,
                stderr=self.said,
                process_group=0,  # Ctrl-C is not for it
            )

    def end(self, left: int) -> None:
        """Print how the process ended, and that `left` more graphs are to be compiled."""
        if failed := self.process.returncode:
            self.said.seek(0)
            lines = self.said.read().decode(errors="replace").strip().splitlines()
            reason = lines[-1] if lines else f"its process ended with {failed}"
            print(f"note: a round stays eager, as it was not compiled: {reason}", file=sys.stderr)
        else:
            seconds, more = time.perf_counter() - self.begun, f"; {left} more are to come" if left else ""
            print(f"note: a round was compiled in {seconds:.0f} s and is cached{more}", file=sys.stderr)
        self.said.close()


class Workshop:
    """Compiles graphs, first the graph that most rounds were without."""

    def __init__(self):
        """Begin without orders."""
        self.orders: list[Order] = []
        self.works: list[Work] = []

    def order_of(self, graph: RoundGraph, library: Path) -> Order:
        """Return the order of this library, a new one if there is none."""
        known = next((order for order in self.orders if order.library == library), None)
        if known is None:
            self.orders.append(known := Order(written(graph), library))
        return known

    def look(self, order: Order) -> Callable[[list[Tensor]], list[Tensor]] | None:
        """Return the function of the order if it has been compiled; else a round goes without it. Never waits."""
        order.wanted += 1
        self._go_on(1)
        return build.load_if_present(order.library) if order.over else None

    def forget(self) -> None:
        """Drop the orders that have not begun."""
        self.orders = [work.order for work in self.works]

    def finish(self) -> None:
        """Wait until all orders are done. Meanwhile there is a process for each of torch's threads."""
        while self.orders:
            self._go_on(full_threads())
            time.sleep(0.05)

    def _go_on(self, most: int) -> None:
        """Remove the orders that have ended, and begin others, at most this many at a time."""
        for work in [work for work in self.works if work.process.poll() is not None]:
            self.works.remove(work)
            self.orders.remove(work.order)
            work.order.over = True
            work.end(len(self.orders))
        waiting = set(self.orders) - {work.order for work in self.works}
        while waiting and len(self.works) < most:
            order = max(waiting, key=lambda other: other.wanted)
            waiting.remove(order)
            self.works.append(Work(order))


@one_sentence_errors
def main() -> None:
    """Compile the graph that is read from standard input."""
    native.load()
    native.has_rows()
    (nodes, inputs), library, threads = pickle.load(sys.stdin.buffer)
    with suppress(OSError):  # where a sandbox forbids it
        os.nice(19)
        if hasattr(os, "SCHED_IDLE"):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    torch.set_num_threads(threads)
    build.make_library(read(nodes, inputs), Path(library))
