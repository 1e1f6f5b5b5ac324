"""What a time depends on beside the code."""

import os
import platform
from pathlib import Path

import torch


def processor() -> str:
    """The processor's name as Linux tells it; elsewhere what Python knows."""
    return _told("model name") or platform.processor() or platform.machine()


def features() -> str:
    """What a processor that bears this name can do here: the same code runs where this is the same."""
    return _told("flags") or _told("Features") or processor()


def _told(name: str) -> str:
    """What Linux says of the first processor; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n")
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), "")


def machine(device: torch.device) -> dict:
    """What a time depends on beside the code: processor, cores, torch's threads, device."""
    kind = {"cpu": processor(), "cores": os.cpu_count(), "threads": torch.get_num_threads(), "device": str(device)}
    return kind | ({"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {})
