"""Seconds and bytes of a training step, measured on this machine, and the memory and disk that are free."""

import itertools
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from specdec.training.features.online import online_features
from specdec.training.loop.trainer import Trainer

STEPS = 3  # that are timed


@dataclass
class Measured:
    """A few real steps in this process."""

    peak: int | None  # bytes; None if the system does not report it
    seconds_a_token: float  # of a training step, padding counted
    features_seconds_a_token: float  # of the target's forward alone


def measure(trainer: Trainer, largest: list[int]) -> Measured:
    """Take a step on the largest batch, given as sample indices, for the peak, and time the run's first steps.

    The trainer cannot be used afterwards: its weights have changed.
    """
    data, device = trainer.data, trainer.target.device
    clock = Clock(device)
    clock.reset_peak()
    trainer._step([data.collate(largest)])
    peak = clock.peak()
    batches = list(itertools.islice(data.iterate(), STEPS))
    tokens = sum(batch.tokens.numel() for batch in batches)
    seconds = sum(clock.seconds(lambda batch=batch: trainer._step([batch])) for batch in batches)
    taps, autocast = trainer.drafter.taps, trainer.config.autocasting(device)
    features = sum(
        clock.seconds(lambda batch=batch: online_features(trainer.target, batch, taps, autocast)) for batch in batches
    )
    return Measured(peak, seconds / tokens, features / tokens)


class Clock:
    """Seconds, and peaks of memory: the GPU's, or this process's."""

    CLEAR = Path("/proc/self/clear_refs")

    def __init__(self, device: torch.device):
        """Measure the GPU if `device` is one, or else this process."""
        self.cuda = device.type == "cuda"

    def seconds(self, work) -> float:
        """Return the seconds that `work()` takes, including its work on the GPU."""
        start = time.perf_counter()
        work()
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def reset_peak(self) -> None:
        """Restart the measurement of peak memory, if the system allows it."""
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        elif self.CLEAR.exists() and os.access(self.CLEAR, os.W_OK):
            self.CLEAR.write_text("5")

    def peak(self) -> int | None:
        """Return the peak memory in bytes, or None if the system does not report it."""
        if self.cuda:
            return torch.cuda.max_memory_allocated()
        return process_memory("VmHWM")


def process_memory(what: str) -> int | None:
    """Bytes that this process has (VmRSS) or had at most (VmHWM); None if the system does not report it."""
    status = Path("/proc/self/status")
    rows = status.read_text().splitlines() if status.exists() else []
    return next((int(row.split()[1]) * 1024 for row in rows if row.startswith(what)), None)


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be allocated, including this process's own; None if the system does not report it."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    info = Path("/proc/meminfo")
    rows = dict(row.split(":") for row in info.read_text().splitlines()) if info.exists() else {}
    return int(rows["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in rows else None


def free_disk(folder: Path) -> int:
    """Bytes that are free on the disk on which `folder` would be made."""
    folder = folder.absolute()
    return shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists())).free
