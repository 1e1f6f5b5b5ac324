"""CUDA graphs of whole rounds: captured once for each shape, replayed without Python (docs/graphs.md).

A round can be captured because it is a function of tensors. All that it needs on the host are shapes, and of those one
alone changes: how many slots of the caches are read. That goes in steps (`static_batch.buckets`). Everything a round
keeps for the next one lies in tensors that never move (`static_batch.StaticBatch`).
"""

from collections import abc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from specdec.contracts import Drafter
from specdec.engine.adaptive import Policy
from specdec.engine.clock import Clock
from specdec.engine.compiled.backend import CompiledRounds, compiled_run
from specdec.engine.compiled.build import compile_now
from specdec.engine.round import Round
from specdec.engine.static_batch import STEP, Backend, StaticBatch
from specdec.kernels import backends

ROOMS = [1024 * 4**k for k in range(16)]  # where a graph serves all bounds: few, as each room has a graph of its own
WARM_UPS = 2  # runs before a capture: kernels are compiled, libraries find their handles and workspaces


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all captures on a device, and of the runs that warm up for them. Only one captures at a time. What
    the runs leave in torch's allocator can be taken by no other stream, so one stream for each engine would waste it;
    torch's own default is one stream for the process, whatever the device."""
    return torch.cuda.Stream(device)


@contextmanager
def own_workspaces() -> Iterator[None]:
    """Let cuBLAS take the workspaces of a capture from the pool of the graph.

    Torch keeps a workspace for each handle and stream. A graph has its address, and does not hold it. A workspace that
    a warm-up has made would serve all graphs captured on the stream, and torch 2.13 gives it back as soon as one of
    them is gone, while the others write to it (pytorch issue 193402). So a capture begins without one, as in torch's
    own `cudagraph_trees`, and leaves none behind that others would find in the pool."""
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


class CudaGraphs:
    """Graphs of one engine, in one memory pool: they never run at the same time, and what a round leaves in the pool is
    copied out before the next."""

    any_bound = False
    late = True

    def __init__(self, device: torch.device, compiles: bool = False):
        """compiles: let Inductor compile a round before it is captured."""
        self.device, self.compiles = device, compiles
        self.stream = capture_stream(device)
        self.forget()

    def forget(self) -> None:
        # A pool whose last graph is gone cannot be captured into again.
        self.pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[int], Any], kept: abc.Sequence[Tensor], bound: int) -> Callable[[int], Any]:
        with torch.cuda.device(self.device):
            if self.compiles:
                run = compiled_run(run, kept, [bound], compile_now)
            self._warm_up(run, kept, bound)
            graph = torch.cuda.CUDAGraph()
            # Other threads, such as a data loader's, may go on using the device while this one captures.
            how = {"pool": self.pool, "stream": self.stream, "capture_error_mode": "thread_local"}
            # A capture may make the tensors in which torch's own generator tells its state to the graphs of anybody.
            # Made in the engine's inference mode they could not be written to outside (pytorch issue 166792).
            outside = torch.inference_mode(False)
            with own_workspaces(), outside, torch.cuda.graph(graph, **how), torch.inference_mode():
                made = run(bound)

        # What was compiled may have tensors of its own that the graph reads.
        return partial(_replay, graph, made, run if self.compiles else None)

    def _warm_up(self, run: Callable[[int], Any], kept: abc.Sequence[Tensor], bound: int) -> None:
        """Run aside from the current stream, as torch asks for before a capture, and undo what that changed. What it
        wrote into caches lies behind the committed slots, where it is void."""
        before = [x.clone() for x in kept]
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            for _ in range(WARM_UPS):
                run(bound)
        current.wait_stream(self.stream)
        for x, old in zip(kept, before, strict=True):
            x.copy_(old)


def _replay(graph: torch.cuda.CUDAGraph, made: Any, held: Any, bound: int) -> Any:
    """Replay a graph, and give what its capture has made. held: lives as long as the graph."""
    graph.replay()
    return made


def obstacle(target, drafter: Drafter | None) -> str | None:
    """Why rounds of these two cannot be captured, or None. Tree policies and verifiers always can: they keep nothing
    and never wait for the device."""
    for part in (target, drafter):
        if part is not None and not part.capturable:
            name = type(part).__name__
            return f"{name} cannot be captured: it works with shapes or values that change from round to round"
    return None


def widths_up_to(rows: int) -> list[int]:
    """Numbers of rows for which rounds are recorded where sequences come and go: powers of two, and `rows` at last."""
    return [2**i for i in range((rows - 1).bit_length())] + [rows]


def make_graphs(
    wanted: "bool | Backend | None", round_: Round, compiles: bool | str = False, adaptive: Policy | None = None
) -> "Graphs | None":
    """The graphs of an engine. wanted: False for none; None for graphs if this is a GPU and nothing stands against
    them; True, or a backend, for graphs or a ValueError that says why not. compiles: rounds are compiled,
    with "aside" in another process, or a ValueError says why not. adaptive: chooses the trees of rounds."""
    device, cuts = round_.target.device, adaptive is not None and adaptive.cuts
    if cuts and (compiles or wanted):
        raise ValueError(
            f"the policy {adaptive.name!r} leaves out nodes of trees that the host has seen, and recorded or compiled "
            "rounds show none: decode without graphs and compiling, or by table or ema"
        )
    if compiles:
        return Graphs(round_, compiling_backend(wanted, round_, compiles == "aside"))
    if wanted is False or (wanted is None and (device.type != "cuda" or cuts)):
        return None
    if why := obstacle(round_.target, round_.drafter):
        if wanted is None:
            return None
        raise ValueError(f"{why}; decode without graphs")
    if wanted is True and device.type != "cuda":
        raise ValueError(f"CUDA graphs need a GPU, and the target is on the {device.type}; decode without graphs")
    return Graphs(round_, CudaGraphs(device) if wanted in (True, None) else wanted)


def compiling_backend(wanted: "bool | Backend | None", round_: Round, aside: bool) -> Backend:
    """What compiles rounds on the target's device. On a GPU the compiled rounds are captured."""
    device = round_.target.device
    if why := obstacle(round_.target, round_.drafter):
        raise ValueError(f"{why}; decode without compiling")
    if device.type == "cpu" and wanted is None:
        return CompiledRounds(aside)
    if device.type == "cuda" and wanted in (True, None):
        if set(backends()) != {"torch"}:
            raise ValueError("rounds are compiled of torch's operators only: call specdec.kernels.use('torch') before")
        return CudaGraphs(device, compiles=True)
    if device.type in ("cpu", "cuda"):
        raise ValueError(f"graphs={wanted} contradicts compile=True on the {device.type}")
    raise ValueError(f"rounds are compiled for CPUs and NVIDIA's GPUs, and the target is on the {device.type}")


class Graphs:
    """The batch of an engine whose rounds are recorded. It is kept from call to call, and made anew for another number
    of rows, for longer texts than there was room for, and after weights have changed."""

    def __init__(self, round_: Round, backend: Backend):
        self.round, self.backend = round_, backend
        self.batch: StaticBatch | None = None

    def room_for(self, widths: list[int], room: int) -> int:
        """For rows of up to `room` tokens: the room that the batch has which is kept, or, if there is none that fits,
        the room to make one for. widths: numbers of rows that rounds are recorded for, ascending."""
        kept = self.batch
        if kept is not None:
            if kept.widths == widths and kept.room >= room and kept.signature == self._signature():
                return kept.room
            self.batch = None
            self.backend.forget()
        step = STEP if not self.backend.any_bound else next(size for size in ROOMS if size >= room)
        return max(room, min(-(-room // step) * step, self.round.target.config.context))

    def begin(
        self, widths: list[int], room: int, clock: Clock, adaptive: Policy | None = None, crowd: bool = False
    ) -> "StaticBatch":
        """The batch, empty; `room` as `room_for` has told it, adaptive and crowd as for `StaticRows.begin`."""
        if self.batch is None:
            self.batch = StaticBatch(self.round, widths, room, self.backend, clock)
            self.batch.signature = self._signature()
        self.batch.begin(clock, adaptive, crowd)
        return self.batch

    def finish(self) -> None:
        """Wait until what is compiled in other processes is there."""
        workshop = getattr(self.backend, "workshop", None)
        if workshop is not None:
            workshop.finish()

    def _signature(self) -> tuple:
        """Changes when a tensor moves that a graph reads, or its values do, from which others may have been made."""
        modules = [part for part in (self.round.target, self.round.drafter) if part is not None]
        tensors = [x for module in modules for x in (*module.parameters(), *module.buffers())]
        return backends(), tuple((x.data_ptr(), 0 if x.is_inference() else x._version) for x in tensors)
