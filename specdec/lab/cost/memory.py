"""Memory: how fast a device moves it, how much a decoding takes, and what plain decoding must read for each token."""

import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from specdec.model.cpu_linear import bytes_read

CPU_BYTES, GPU_BYTES = 1 << 28, 1 << 30


def seconds_of(run: Callable[[], object], device: torch.device, trials: int = 5) -> float:
    """Median seconds of a call, from an idle device until the device has finished, over `trials` after a warm-up."""
    times = []
    for trial in range(trials + 1):  # the first warms up
        wait(device)
        start = time.perf_counter()
        run()
        wait(device)
        if trial:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def wait(device: torch.device) -> None:
    """Wait until the device has finished what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bandwidth(device: torch.device, size: int | None = None) -> float:
    """The most bytes/s that this device moves: the faster of reading `size` bytes and of copying them.

    On the CPU torch's present number of threads reads. The default size fits into no cache: 256 MiB on the CPU, 1 GiB
    on a GPU.
    """
    size = size or (GPU_BYTES if device.type == "cuda" else CPU_BYTES)
    source = torch.ones(size // 4, device=device)
    copy = torch.empty_like(source)
    read = size / seconds_of(source.sum, device)
    return max(read, 2 * size / seconds_of(lambda: copy.copy_(source), device))


def read_bytes(target, context: float, *, packed: bool = True) -> float:
    """Bytes that plain decoding of one row must read for the token behind `context` tokens.

    These are all weights, the embedding only where it is the head too, and the keys and values that the layers see.
    packed: count weights as this engine reads them after packing (`specdec.model.cpu_linear`), not as they are held."""
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


class PeakMemory:
    """A context whose `bytes` is the most memory in use within it.

    On a GPU these are the bytes allocated beyond those at the beginning. On the CPU it is the largest resident set that
    the process has had since it started, which never falls."""

    def __init__(self, device: torch.device):
        self.device, self.bytes = device, 0

    def __enter__(self) -> "PeakMemory":
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self.before = torch.cuda.memory_allocated(self.device)
        return self

    def __exit__(self, *_) -> None:
        if self.device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self.device) - self.before
        else:
            unit = 1 if sys.platform == "darwin" else 1024
            self.bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def resident_bytes() -> int:
    """Bytes of the resident set of this process now. Linux only."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
