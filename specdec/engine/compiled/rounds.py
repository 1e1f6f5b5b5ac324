"""The executor that compiles rounds (docs/compile.md)."""

import sys
import time
from collections import abc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from specdec.engine.compiled import build
from specdec.engine.compiled.build import Workshop
from specdec.engine.compiled.graph import Record, RoundGraph, filler, make_graph, record
from specdec.engine.executor import restored
from specdec.ops import native

LEAST = 2  # smallest bound that a compiled round is given: Inductor treats lengths of 0 and 1 as special cases


class CompiledRounds:
    """The executor of compiled rounds on the CPU, each of them one function.

    A captured round serves all bounds up to that of its capture. A replay has run when it returns, so it is not read
    late. Raises ValueError if this machine cannot compile.
    """

    any_bound, late = True, False

    def __init__(self, in_background: bool = False):
        """in_background: compile in another process what is not cached yet, and run eager rounds meanwhile."""
        native.load()
        self.workshop = Workshop() if in_background else None

    def forget(self) -> None:
        """Drop the graphs that wait to be compiled: see `Executor`."""
        if self.workshop is not None:
            self.workshop.forget()

    def capture(self, run: Callable[[int], Any], preserved: abc.Sequence[Tensor], bound: int) -> Callable[[int], Any]:
        """Return the compiled round, or one that stays eager until it is compiled: see `Executor`."""
        # Half the bound shows most. But of a window between the two only the longer one has a mask.
        bounds = [bound, max(bound // 2, 1), max(bound - 1, 1)]
        graph = recorded_graph(run, preserved, bounds)
        if (workshop := self.workshop) is None:
            return replay_of(graph, self.compile(graph))
        library = build.library_path(graph)
        if compiled := build.load_if_present(library):
            return replay_of(graph, compiled)
        order, replay = workshop.order_of(graph, library), None

        def play(bound: int) -> Any:
            nonlocal replay
            if replay is None:
                compiled = workshop.look(order)
                if compiled is None:
                    return replace(run(bound), eager=True)
                replay = replay_of(graph, compiled)
            return replay(bound)

        return play

    def compile(self, graph: RoundGraph) -> build.Compiled:
        """Compile a graph, or load it from the cache. Prints a line with the time on standard error."""
        start, library = time.perf_counter(), build.library_path(graph)
        if compiled := build.load_if_present(library):
            print(f"note: loaded a compiled round in {time.perf_counter() - start:.2f} s", file=sys.stderr)
            return compiled
        print("note: compiling a round ... ", end="", file=sys.stderr, flush=True)
        said = "it failed"
        try:
            build.make_library(graph, library)
            said = f"{time.perf_counter() - start:.1f} s, and it is cached"
        finally:
            print(said, file=sys.stderr)
        return build.load(library)


def recorded_graph(run: Callable[[int], Any], preserved: abc.Sequence[Tensor], bounds: list[int]) -> RoundGraph:
    """Return the graph of what `run` does. preserved: as for `Executor.capture`.

    bounds: the largest bound, or the only one, then further bounds. These show how the graph depends on the bound.
    """

    def undone(bound: int) -> Record:
        with restored(preserved):
            return record(run, bound, native.SEEN)

    with restored(preserved):  # makes tensors that are cached, and checks the user's own parts, which reads values
        run(bounds[0])
    one, other = undone(bounds[0]), None
    for bound in bounds[1:]:  # until the operators are the same
        if (other := undone(bound)).operators() == one.operators():
            break
    return make_graph(one, other)


def replay_of(graph: RoundGraph, compiled: build.Compiled) -> Callable[[int], Any]:
    """Return the round as a function of the bound."""
    ruler, *inputs = graph.inputs
    returned = filler(graph.made, {id(old): i for i, old in enumerate(graph.new)})

    def replay(bound: int) -> Any:
        return returned(compiled([ruler[: max(bound, LEAST)], *inputs]))

    return replay
