"""CUDA graphs of whole rounds: captured once for each shape, replayed without Python (docs/graphs.md).

A round can be captured because it is a function of tensors. On the host it needs shapes only, and one of them changes:
the number of cache slots that attention reads. It grows in steps (`executor.buckets`). Everything that a round
leaves to the next one is in tensors that never move (`batch_tensors.BatchTensors`).
"""

from collections import abc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from specdec.contracts import Drafter
from specdec.engine.adaptive import Policy
from specdec.engine.batch import Batch
from specdec.engine.compiled.build import compile_now
from specdec.engine.compiled.rounds import CompiledRounds, recorded_graph, replay_of
from specdec.engine.executor import STEP, Executor, restored
from specdec.engine.report import Clock
from specdec.engine.round import Round
from specdec.model.layers import weight_state
from specdec.ops import backends

ROOMS = [1024 * 4**k for k in range(16)]  # where a graph serves all bounds: few, as each room has a graph of its own
WARM_UPS = 2  # runs before a capture: kernels are compiled, libraries find their handles and workspaces


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all captures on a device, and of the runs that warm up for them.

    Only one captures at a time. No other stream can use the memory that these runs leave in torch's allocator.
    """
    return torch.cuda.Stream(device)


@contextmanager
def own_workspaces() -> Iterator[None]:
    """Let cuBLAS take the workspaces of a capture from the pool of the graph.

    A workspace that a warm-up has made would serve all graphs captured on the stream. Torch 2.13 frees it as soon as
    one of them is gone, while the others write to it (pytorch issue 193402). So a capture begins without one, and frees
    its own, as in torch's own `cudagraph_trees`.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


class CudaGraphs:
    """The executor of CUDA graphs, all in one memory pool.

    Graphs never run at the same time, and what a round leaves in the pool is copied out before the next one starts.
    """

    any_bound, late = False, True

    def __init__(self, device: torch.device, compiles: bool = False):
        """compiles: let Inductor compile a round before it is captured."""
        self.device, self.compiles = device, compiles
        self.stream = capture_stream(device)
        self.forget()

    def forget(self) -> None:
        """Start a new memory pool: one whose last graph was freed cannot be captured into again."""
        self.pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[int], Any], preserved: abc.Sequence[Tensor], bound: int) -> Callable[[int], Any]:
        """Return the replay of a CUDA graph: see `Executor`."""
        with torch.cuda.device(self.device):
            if self.compiles:
                recorded = recorded_graph(run, preserved, [bound])
                run = replay_of(recorded, compile_now(recorded))
            # On the side stream, as torch requires before a capture. What the runs write into caches lies after the
            # committed slots, where it is void.
            with restored(preserved):
                current = torch.cuda.current_stream()
                self.stream.wait_stream(current)
                with torch.cuda.stream(self.stream):
                    for _ in range(WARM_UPS):
                        run(bound)
                current.wait_stream(self.stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads, such as a data loader's, may still use the device while this one captures.
            how: dict[str, Any] = {"pool": self.pool, "stream": self.stream, "capture_error_mode": "thread_local"}
            # A capture may allocate the tensors in which torch's generator stores its state for graphs of any owner.
            # Made in the engine's inference mode they could not be written to outside (pytorch issue 166792).
            outside = torch.inference_mode(False)
            with own_workspaces(), outside, torch.cuda.graph(graph, **how), torch.inference_mode():
                made = run(bound)

        # What was compiled may have tensors of its own that the graph reads.
        def replay(bound: int, held: Any = run if self.compiles else None) -> Any:
            graph.replay()
            return made

        return replay


def obstacle(target, drafter: Drafter | None) -> str | None:
    """Return why rounds of this target and drafter cannot be captured, or None.

    Tree policies and verifiers always can: they have no state and never wait for the device.
    """
    for part in (target, drafter):
        if part is not None and not part.capturable:
            name = type(part).__name__
            return f"{name} cannot be captured: it works with shapes or values that change from round to round"
    return None


def widths_up_to(rows: int) -> list[int]:
    """Return the numbers of rows of captured rounds where sequences join and leave: powers of two, and `rows`."""
    return [2**i for i in range((rows - 1).bit_length())] + [rows]


def make_graphs(
    wanted: "bool | Executor | None",
    round_: Round,
    compiles: bool | str = False,
    adaptive: Policy | None = None,
    abstain: bool = True,
) -> "Graphs | None":
    """Return the graphs of an engine, or None for eager rounds; the other arguments are those of `Engine`.

    wanted: None for graphs on a GPU if target and drafter can be captured; True, or an executor, for graphs.

    Raises ValueError, with the reason, if rounds cannot be captured or compiled as wanted.
    """
    device, cuts = round_.target.device, adaptive is not None and adaptive.cuts
    if adaptive is not None and cuts and (compiles or wanted):
        raise ValueError(
            f"the policy {adaptive.name!r} leaves out nodes of trees that the host has seen, and recorded or compiled "
            "rounds show none: decode without graphs and compiling, or by table or ema"
        )
    if compiles:
        return Graphs(round_, compiling_executor(wanted, round_, compiles == "aside"), abstain)
    if wanted is False or (wanted is None and (device.type != "cuda" or cuts)):
        return None
    if why := obstacle(round_.target, round_.drafter):
        if wanted is None:
            return None
        raise ValueError(f"{why}; decode without graphs")
    if wanted is True and device.type != "cuda":
        raise ValueError(f"CUDA graphs need a GPU, and the target is on the {device.type}; decode without graphs")
    return Graphs(round_, CudaGraphs(device) if wanted is None or isinstance(wanted, bool) else wanted, abstain)


def compiling_executor(wanted: "bool | Executor | None", round_: Round, background: bool) -> Executor:
    """Return the executor that compiles rounds on the target's device. On a GPU it captures the compiled rounds."""
    device = round_.target.device
    if why := obstacle(round_.target, round_.drafter):
        raise ValueError(f"{why}; decode without compiling")
    if device.type == "cpu" and wanted is None:
        return CompiledRounds(background)
    if device.type == "cuda" and wanted in (True, None):
        if set(backends()) != {"torch"}:
            raise ValueError("rounds are compiled of torch's operators only: call specdec.ops.use('torch') before")
        return CudaGraphs(device, compiles=True)
    if device.type in ("cpu", "cuda"):
        raise ValueError(f"graphs={wanted} contradicts compile=True on the {device.type}")
    raise ValueError(f"rounds are compiled for CPUs and NVIDIA's GPUs, and the target is on the {device.type}")


class Graphs:
    """The batch of an engine whose rounds are captured. It outlives a call.

    It is made again for other numbers of rows, for texts that are too long for it, and after weights have changed.
    """

    def __init__(self, round_: Round, executor: Executor, abstain: bool = True):
        """Begin without a batch. abstain: as for `Batch`."""
        self.round, self.executor, self.abstain = round_, executor, abstain
        self.batch: Batch | None = None
        self.signature: tuple = ()  # as of the batch

    def room_for(self, widths: list[int], room: int) -> int:
        """Return the room of the present batch if it suits rows of up to `room` tokens, else that of a new one."""
        if (old := self.batch) is not None:
            if old.widths == widths and old.room >= room and self.signature == self._signature():
                return old.room
            self.batch = None
            self.executor.forget()
        step = STEP if not self.executor.any_bound else next(size for size in ROOMS if size >= room)
        return max(room, min(-(-room // step) * step, self.round.target.config.context))

    def begin(
        self, widths: list[int], room: int, clock: Clock, adaptive: Policy | None = None, continuous: bool = False
    ) -> Batch:
        """Return the batch, empty; `room` as `room_for` returned it, adaptive and continuous as for `Batch.begin`."""
        if self.batch is None:
            self.batch = Batch(self.round, widths[-1], room, clock, self.executor, widths, abstain=self.abstain)
            self.signature = self._signature()
        self.batch.begin(clock, adaptive, continuous)
        return self.batch

    def finish(self) -> None:
        """Wait until all rounds are compiled that other processes compile."""
        if (workshop := getattr(self.executor, "workshop", None)) is not None:
            workshop.finish()

    def _signature(self) -> tuple:
        """Changes when a tensor moves that a graph reads, or its values do, from which others may have been made."""
        modules = [part for part in (self.round.target, self.round.drafter) if part is not None]
        tensors = [x for module in modules for x in (*module.parameters(), *module.buffers())]
        return backends(), weight_state(tensors)
