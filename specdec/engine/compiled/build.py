"""Inductor compiles a graph into a library. The library is cached, so the next process loads it without Inductor."""

import hashlib
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

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
    """Compile a graph of tensors on the CPU, and move the library into place when it is complete.

    Raises:
        ValueError: The compilation failed.
    """
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
