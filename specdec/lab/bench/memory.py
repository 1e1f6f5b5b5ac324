"""Seconds of work on a device; how fast it moves memory; what a decoding takes, and plain decoding must read."""

import resource
import statistics
import sys
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from specdec.engine.report import Clock
from specdec.ops.linear import bytes_read

WARM_UPS, TRIALS = 3, 5
CPU_BYTES, GPU_BYTES = 1 << 28, 1 << 30


def wait(device: torch.device) -> None:
    """Wait until the device has finished what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds that the device works on `run`, after a few warm-ups."""
    times = []
    for _ in range(WARM_UPS + TRIALS):
        clock = Clock(device)
        run()
        clock.mark("run")
        times.append(clock.seconds()["run"])
    return statistics.median(times[WARM_UPS:])


def bandwidth(device: torch.device) -> float:
    """Return the memory's bytes/s: the faster of reading and copying a tensor beyond any cache, by torch's threads."""
    size = GPU_BYTES if device.type == "cuda" else CPU_BYTES
    source = torch.ones(size // 4, device=device)
    copy = torch.empty_like(source)
    read = size / device_seconds(source.sum, device)
    return max(read, 2 * size / device_seconds(lambda: copy.copy_(source), device))


def read_bytes(target, context: float, *, packed: bool = True) -> float:
    """Return the bytes that plain decoding of one row must read for the token after `context` tokens.

    These are all weights and the keys and values that the layers see. The embedding counts only if it is also the head.
    With `packed`, weights count as the engine reads them after packing (`specdec.ops.linear`), else as they are stored.
    """
    config, table = target.config, target.embed.weight
    read = {id(p): bytes_read(p) if packed else p.nbytes for p in target.parameters()}
    if target.head.weight is not table:
        del read[id(table)]
    sliding = config.sliding or (False,) * config.layers
    seen = sum(min(context, config.window) if slides else context for slides in sliding)
    kv_heads, head_dim = target.cache_shape
    return sum(read.values()) + 2 * seen * kv_heads * head_dim * target.dtype.itemsize


def size_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of these tensors together."""
    return sum(x.nbytes for x in tensors)


def reset_peak(device: torch.device) -> int:
    """Measure the peak from here on. Return the bytes that are allocated on a GPU now; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def peak_bytes(device: torch.device, before: int) -> int:
    """Return the most that was allocated on a GPU beyond what `reset_peak` returned.

    On a CPU it is the peak resident set size since the process started, which never falls.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) - before
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
