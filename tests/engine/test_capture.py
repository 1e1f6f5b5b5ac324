"""In what order a capture calls torch: a stand-in notes the calls. Only a GPU can show what they do."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from specdec.engine import graphs

DEVICE = torch.device("cuda", 0)


class Stream:
    def __init__(self, log: list, name: str):
        self.log, self.name = log, name

    def wait_stream(self, other: "Stream") -> None:
        self.log.append(f"{self.name} waits for {other.name}")


class FakeCuda:
    """What `graphs` uses of `torch.cuda`."""

    def __init__(self, log: list):
        self.log, self.current, self.streams, self.pools = log, Stream(log, "current"), 0, 0
        self.CUDAGraph = lambda: SimpleNamespace(
            replay=lambda: log.append("replay"),
        )

    def Stream(self, device: torch.device) -> Stream:
        self.streams += 1
        return Stream(self.log, f"side {self.streams}")

    def graph_pool_handle(self) -> int:
        self.pools += 1
        return self.pools

    def current_stream(self) -> Stream:
        return self.current

    @contextmanager
    def device(self, device: torch.device):
        yield

    @contextmanager
    def stream(self, stream: Stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def graph(self, graph, pool: int, stream: Stream, capture_error_mode: str):
        self.log.append(f"capture in pool {pool}, {capture_error_mode}")
        with self.stream(stream):
            yield
        self.log.append("captured")


@pytest.fixture
def log(monkeypatch):
    log = []
    monkeypatch.setattr(torch, "cuda", FakeCuda(log))
    monkeypatch.setattr(
        torch._C, "_cuda_clearCublasWorkspaces", lambda: log.append("workspaces cleared"), raising=False
    )
    graphs.capture_stream.cache_clear()
    yield log
    graphs.capture_stream.cache_clear()


def test_warm_up_and_capture(log):
    """Both run on the side stream. A capture finds no workspace and leaves none, and what it changes is put back."""
    backend = graphs.CudaGraphs(DEVICE)
    kept, seen = torch.tensor([1, 2]), []

    def run(bound: int) -> str:
        log.append(f"run on {torch.cuda.current_stream().name}")
        seen.append(kept.tolist())
        kept.add_(1)
        return f"made for {bound}"

    replay = backend.capture(run, [kept], 256)
    assert log == [
        "side 1 waits for current", "run on side 1", "run on side 1", "current waits for side 1",
        "workspaces cleared", "capture in pool 1, thread_local", "run on side 1", "captured", "workspaces cleared",
    ]  # fmt: skip
    assert seen == [[1, 2], [2, 3], [1, 2]]
    log.clear()
    assert replay(7) == "made for 256"
    assert log == ["replay"]


def test_a_round_is_compiled_before_it_is_captured(log, monkeypatch):
    """What is warmed up and captured is the compiled function; what recording changed is put back. What it reads lives
    as long as the graph."""
    inputs = []

    def compiling(graph):
        log.append("compiled")
        inputs.extend(StorageWeakRef(x.untyped_storage()) for x in graph.inputs)
        return lambda inputs: log.append("compiled run") or list(graph.module(*inputs))

    monkeypatch.setattr(graphs, "compile_now", compiling)
    backend = graphs.CudaGraphs(DEVICE, compiles=True)
    kept = torch.tensor([1, 2])

    def run(bound: int) -> torch.Tensor:
        kept.add_(1)
        return kept * bound

    with torch.inference_mode():
        replay = backend.capture(run, [kept], 256)
        assert kept.tolist() == [2, 3]  # the capture itself, which on a GPU runs nothing
        assert torch.equal(replay(7), kept * 256)
    assert [entry for entry in log if "compiled" in entry] == ["compiled"] + ["compiled run"] * 3
    assert log.index("compiled") < log.index("side 1 waits for current")
    assert not any(x.expired() for x in inputs)
    del replay
    assert inputs[0].expired()


def test_what_a_failed_capture_leaves(log):
    """No workspace that lies in the pool of a graph which is not there."""
    backend = graphs.CudaGraphs(DEVICE)

    def run(_: int) -> None:
        if log[-1].startswith("capture in"):
            raise RuntimeError("cannot be captured")

    with pytest.raises(RuntimeError, match="cannot be captured"):
        backend.capture(run, [], 256)
    assert log[-1] == "workspaces cleared"


def test_engines_share_a_stream_and_no_pool(log):
    first, second = graphs.CudaGraphs(DEVICE), graphs.CudaGraphs(DEVICE)
    other = graphs.CudaGraphs(torch.device("cuda", 1))
    assert first.stream is second.stream is not other.stream
    assert len({first.pool, second.pool, other.pool}) == 3
    pool = first.pool
    first.forget()
    assert first.pool not in (pool, second.pool)
