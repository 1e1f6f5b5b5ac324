"""How fast this machine moves memory, how much of it a decoding takes, what plain decoding must read for a token."""

import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from specdec.model.cpu_linear import bytes_read

CPU_BYTES, GPU_BYTES = 1 << 28, 1 << 30


def seconds_of(run: Callable[[], object], device: torch.device, trials: int = 5) -> float:
    """Median time of a call that the device has finished."""
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
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bandwidth(device: torch.device, size: int | None = None) -> float:
    """Bytes/s that this device moves at best: the faster of reading `size` bytes and of copying them.

    On the CPU with torch's present number of threads; the default size, 256 MiB, 1 GiB on a GPU, fits into no cache.
    """
    size = size or (GPU_BYTES if device.type == "cuda" else CPU_BYTES)
    source = torch.ones(size // 4, device=device)
    copy = torch.empty_like(source)
    read = size / seconds_of(source.sum, device)
    return max(read, 2 * size / seconds_of(lambda: copy.copy_(source), device))


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters, shared ones once."""
    return size_of({id(p): p for p in model.parameters()}.values())


def read_bytes(target, context: float, *, packed: bool = True) -> float:
    """Bytes that plain decoding of one row must read for a token behind `context` tokens: every weight, the embedding
    only if it is the head too, and the keys and values that the layers see. packed: as this engine reads weights that
    it has packed (`specdec.model.cpu_linear`), and not as they are held."""
    config, table = target.config, target.embed.weight
    read = {id(p): bytes_read(p) if packed else p.nbytes for p in target.parameters()}
    if target.head.weight is not table:
        del read[id(table)]
    sliding = config.sliding or (False,) * config.layers
    seen = sum(min(context, config.window) if slides else context for slides in sliding)
    kv_heads, head_dim = target.cache_shape
    return sum(read.values()) + 2 * seen * kv_heads * head_dim * target.dtype.itemsize


def size_of(tensors: Iterable[Tensor]) -> int:
    return sum(x.nbytes for x in tensors)


class Peak:
    """The most memory in use between `with` and its end, in `bytes`: on a GPU what was allocated beyond what lay there
    before; on the CPU the largest resident set that the whole process has had so far, which never falls."""

    def __init__(self, device: torch.device):
        self.device, self.bytes = device, 0

    def __enter__(self) -> "Peak":
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
    """The resident set of this process now (Linux)."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
