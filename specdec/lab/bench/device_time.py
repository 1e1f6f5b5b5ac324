"""How long the device works on something, without the launches of its parts from Python."""

import statistics
import time
from collections.abc import Callable

import torch

from specdec.lab.cost.memory import wait

Run = Callable[[], object]
WARM_UPS = 3


def captured(run: Run, device: torch.device) -> Run:
    """What does `run` again in one call: a CUDA graph of it. On the CPU, where launches cost little, `run` itself.

    It is run a few times first, so that kernels are compiled and libraries have what they need."""
    if device.type != "cuda":
        return run
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            run()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph.replay


def device_seconds(run: Run, device: torch.device, trials: int, before: Run = lambda: None) -> float:
    """Median seconds of `run` on the device over `trials` after a few that warm up. before: run ahead of each, and not
    timed."""
    times = []
    for _ in range(WARM_UPS + trials):
        before()
        times.append(_once(run, device))
    return statistics.median(times[WARM_UPS:])


def _once(run: Run, device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    wait(device)
    return start.elapsed_time(end) / 1000
