"""Inductor compiles a graph into a library. The library is cached, so the next process loads it without Inductor.

A `Workshop` compiles graphs in another process, while rounds continue. That process has the lowest priority. It may
outlive its parent, and the next process finds its result in the cache.
"""

import copyreg
import hashlib
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from specdec.cli.errors import one_sentence_errors
from specdec.cli.files import keep, kept_folder, output_folder
from specdec.engine.compiled.graph import RoundGraph
from specdec.machine import features
from specdec.ops import native
from specdec.threads import full_threads

LIBRARY = "round.so"
OPTIONS = {"aot_inductor.compile_wrapper_opt_level": "O0"}  # between the kernels little would gain from optimising

Result = TypeVar("Result")
Compiled = Callable[[list[Tensor]], list[Tensor]]  # the graph's inputs -> its outputs


def library_path(graph: RoundGraph) -> Path:
    """Return where the library of this graph is cached, for this processor and number of threads."""
    return kept_folder("compiled") / key_of(graph) / LIBRARY


def key_of(graph: RoundGraph) -> str:
    """Return a key that differs for graphs, processors, versions and settings that need libraries of their own."""
    shapes = [(x.dtype, x.device, tuple(x.shape), x.stride()) for x in graph.inputs]
    settings = sorted(OPTIONS.items()), full_threads(), torch.__version__, features()
    return hashlib.sha256(repr((str(graph.module.graph), shapes, settings)).encode()).hexdigest()[:24]


def load(library: Path) -> Compiled:
    """Return the function in a library. Raises RuntimeError for one that does not load."""
    return torch._C._aoti.AOTIModelContainerRunnerCpu(str(library), 1).run


def load_if_present(library: Path) -> Compiled | None:
    """Return the function in a library; None if there is none, or if it does not load and is removed."""
    try:
        return load(library) if library.is_file() else None
    except RuntimeError:  # it is damaged, or what it is linked with has changed
        shutil.rmtree(library.parent, ignore_errors=True)
        return None


def make_library(graph: RoundGraph, library: Path) -> None:
    """Compile a graph of tensors on the CPU, and cache the whole library. Raises ValueError if that fails."""
    native.compiler()  # or the reason why not

    def fill(folder: Path) -> None:
        made = _compile(graph, folder.with_name("made"))
        folder.mkdir()
        for suffix in (".so", ".json"):  # the second says how operators are called that have no place in C
            if made.with_suffix(suffix).is_file():
                shutil.copy(made.with_suffix(suffix), (folder / LIBRARY).with_suffix(suffix))

    output_folder(library.parent.parent)
    keep(library.parent, fill)


def compile_now(graph: RoundGraph) -> Compiled:
    """Return a graph of tensors on any device as a function. Only Inductor itself caches anything."""
    from torch._inductor import compile

    compiled: Any = _guarded(graph, lambda stand_ins: compile(graph.module, list(stand_ins)))
    return lambda inputs: compiled(*inputs)


def _compile(graph: RoundGraph, folder: Path) -> Path:
    """Return the library, in a new folder with all of its sources."""
    from torch._inductor import aot_compile  # takes seconds to import

    options = OPTIONS | {"aot_inductor.output_path": str(folder)}
    made: Any = _guarded(graph, lambda stand_ins: aot_compile(graph.module, tuple(stand_ins), options=options))
    return Path(made)


def _guarded(graph: RoundGraph, compile: Callable[[list[Tensor]], Result]) -> Result:
    """Compile with stand-ins for the graph's inputs. Raises ValueError if that fails."""
    with torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stand_ins, check = _stand_ins(graph)
        try:
            out = compile(stand_ins)
        except Exception as error:  # whatever Inductor or the compiler has against it
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(f"this round cannot be compiled: {reason}") from error
        check()
    return out


def _stand_ins(graph: RoundGraph) -> tuple[list[Tensor], Callable[[], None]]:
    """Return inputs without contents for the compiler, of which the first may have any length, and a check.

    The check runs after compilation: no assumption of the compiler may hold for some bounds only.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)
    ruler, most = torch.empty(graph.inputs[0].shape), len(graph.inputs[0])
    any_length: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    out: list[Any] = [mode.from_tensor(ruler, symbolic_context=any_length)]
    with mode:
        out += [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in graph.inputs[1:]]
    bound = out[0].shape[0].node.expr

    def check() -> None:
        for guard in shapes.guards:
            for length in {2, 3, most // 2, most - 1, most}:
                if not guard.expr.subs(bound, length):
                    raise ValueError(f"this round cannot be compiled: it holds for {guard.expr} only")

    return out, check


# In another process


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


def written(graph: RoundGraph) -> tuple[list[tuple], list[Shape]]:
    """Return a graph without its tensors, as objects that can be pickled."""
    numbers: dict[fx.Node, Any] = {node: Place(i) for i, node in enumerate(graph.module.graph.nodes)}
    nodes = [
        (node.op, node.target, *fx.node.map_arg((node.args, node.kwargs), numbers.__getitem__))
        for node in graph.module.graph.nodes
    ]
    return nodes, [Shape(tuple(x.shape), x.stride(), x.dtype, x.device) for x in graph.inputs]


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


class Order:
    """A graph that another process compiles."""

    def __init__(self, graph: RoundGraph, library: Path):
        """Write the graph down. library: where its library is cached."""
        self.graph, self.library = written(graph), library
        self.wanted = 0  # rounds that had to do without it
        self.over = False  # it is there, or never will be
        self.process: subprocess.Popen | None = None

    def begin(self) -> None:
        """Start the process."""
        self.begun = time.perf_counter()
        self.said = tempfile.TemporaryFile()  # noqa: SIM115 - a pipe would have to be read
        with tempfile.TemporaryFile() as asked:  # a pipe would wait for the reader
            pickle.dump((self.graph, str(self.library), full_threads()), asked)
            asked.seek(0)
            self.process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import main; main()"],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
                stdin=asked,
                stdout=subprocess.DEVNULL,
                stderr=self.said,
                process_group=0,  # Ctrl-C is not for it
            )

    def ended(self, left: int) -> bool:
        """Return whether the process has ended. Print how, and that `left` more graphs are to be compiled."""
        if self.process is None or (failed := self.process.poll()) is None:
            return False
        self.over = True
        if failed:
            self.said.seek(0)
            lines = self.said.read().decode(errors="replace").strip().splitlines()
            reason = lines[-1] if lines else f"its process ended with {failed}"
            print(f"note: a round stays eager, as it was not compiled: {reason}", file=sys.stderr)
        else:
            seconds, more = time.perf_counter() - self.begun, f"; {left} more are to come" if left else ""
            print(f"note: a round was compiled in {seconds:.0f} s and is cached{more}", file=sys.stderr)
        self.said.close()
        return True


class Workshop:
    """Compiles graphs, first the graph that most rounds were without."""

    def __init__(self):
        """Begin without orders."""
        self.orders: list[Order] = []

    def order_of(self, graph: RoundGraph, library: Path) -> Order:
        """Return the order of this library, a new one if there is none."""
        known = next((order for order in self.orders if order.library == library), None)
        if known is None:
            self.orders.append(known := Order(graph, library))
        return known

    def look(self, order: Order) -> Compiled | None:
        """Return the function of the order if it has been compiled; else a round goes without it. Never waits."""
        order.wanted += 1
        self._go_on(1)
        return load_if_present(order.library) if order.over else None

    def forget(self) -> None:
        """Drop the orders that have not begun."""
        self.orders = [order for order in self.orders if order.process is not None]

    def finish(self) -> None:
        """Wait until all orders are done. Meanwhile there is a process for each of torch's threads."""
        while self.orders:
            self._go_on(full_threads())
            time.sleep(0.05)

    def _go_on(self, most: int) -> None:
        """Remove the orders that have ended, and begin others, at most this many at a time."""
        for order in list(self.orders):
            if order.ended(len(self.orders) - 1):
                self.orders.remove(order)
        waiting = [order for order in self.orders if order.process is None]
        waiting.sort(key=lambda order: -order.wanted)
        for order in waiting[: max(most - (len(self.orders) - len(waiting)), 0)]:
            order.begin()


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
    make_library(read(nodes, inputs), Path(library))
