"""The order in which a capture calls torch, with a stand-in for `torch.cuda`. test_gpu_graphs.py runs the real one."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo  # before `torch.cuda` is replaced, which it reads
from torch.multiprocessing.reductions import StorageWeakRef

from specdec.engine import graphs

DEVICE = torch.device("cuda", 0)


class FakeCuda:
    """The functions of `torch.cuda` that `graphs` calls."""

    def __init__(self, log: list):
        self.log, self.now, self.count = log, "current", 0
        self.CUDAGraph = lambda: SimpleNamespace(replay=lambda: log.append("replay"))
        self.device = lambda _: nullcontext()
        self.current_stream = lambda: self.named("current")
        self.Stream = lambda _: self.named(f"side {self.number()}")
        self.graph_pool_handle = self.number

    def number(self) -> int:
        self.count += 1
        return self.count

    def named(self, name: str):
        return SimpleNamespace(name=name, wait_stream=lambda other: self.log.append(f"{name} waits for {other.name}"))

    @contextmanager
    def stream(self, stream):
        self.now = stream.name
        yield
        self.now = "current"

    @contextmanager
    def graph(self, graph, pool: int, stream, capture_error_mode: str):
        self.log.append(f"capture, {capture_error_mode}")
        with self.stream(stream):
            yield
        self.log.append("captured")


@pytest.fixture
def log(monkeypatch):
    log = []
    monkeypatch.setattr(torch, "cuda", FakeCuda(log))
    clear = "_cuda_clearCublasWorkspaces"
    monkeypatch.setattr(torch._C, clear, lambda: log.append("workspaces cleared"), raising=False)
    graphs.capture_stream.cache_clear()
    yield log
    graphs.capture_stream.cache_clear()


@pytest.mark.parametrize("compiles", [False, True])
def test_warm_up_and_capture(log, compiles, monkeypatch):
    """Both run on the side stream, and what the warm-up changes is undone. A capture finds no cuBLAS workspace and
    leaves none, also if it fails. The inputs of a compiled function live as long as its graph."""
    inputs, preserved = [], torch.tensor([1, 2])

    def compiling(graph):
        log.append("compiled")
        inputs.extend(StorageWeakRef(x.untyped_storage()) for x in graph.inputs)
        return lambda inputs: log.append(f"run on {torch.cuda.now}") or list(graph.module(*inputs))

    monkeypatch.setattr(graphs, "compile_now", compiling)
    backend = graphs.CudaGraphs(DEVICE, compiles)

    def run(bound: int) -> torch.Tensor:
        if not compiles:
            log.append(f"run on {torch.cuda.now}")
        preserved.add_(1)
        return preserved * bound

    with torch.inference_mode():
        replay = backend.capture(run, [preserved], 256)
    assert log == ["compiled"] * compiles + [
        "side 1 waits for current", "run on side 1", "run on side 1", "current waits for side 1",
        "workspaces cleared", "capture, thread_local", "run on side 1", "captured", "workspaces cleared",
    ]  # fmt: skip
    assert preserved.tolist() == [2, 3]  # the capture itself, which on a GPU runs nothing
    assert replay(7).tolist() == [512, 768]
    assert log[-1] == "replay"
    assert not any(x.expired() for x in inputs)
    del replay
    assert not compiles or inputs[0].expired()
    with pytest.raises(ZeroDivisionError):
        graphs.CudaGraphs(DEVICE).capture(lambda _: log[-1].startswith("capture,") and 1 / 0, [], 256)
    assert log[-1] == "workspaces cleared"


def test_engines_share_a_stream_and_no_pool(log):
    first, second, other = (graphs.CudaGraphs(torch.device("cuda", index)) for index in (0, 0, 1))
    assert first.stream is second.stream is not other.stream
    pools = {first.pool, second.pool, other.pool}
    first.forget()
    assert len(pools | {first.pool}) == 4
