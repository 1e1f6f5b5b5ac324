"""Description of the machine, which every timing depends on."""

import os
import platform
from pathlib import Path
from typing import Any

import torch

from specdec.threads import full_threads

PRECISIONS = ("highest", "high", "medium")


def processor() -> str:
    """Return the processor's name from Linux, elsewhere from Python."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def features() -> str:
    """Return the properties of this processor that decide whether compiled code can run on it."""
    return _cpuinfo("flags") or _cpuinfo("Features") or processor()


def _cpuinfo(name: str) -> str:
    """Return a field of /proc/cpuinfo for the first processor; empty if there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n")
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), "")


def set_matmul_precision(name: str | None) -> None:
    """Set the precision of fp32 products in this process, one of `PRECISIONS`; None changes nothing."""
    if name is None:
        return
    if name not in PRECISIONS:
        raise ValueError(f"matmul_precision must be {', '.join(PRECISIONS)}, or not given, got {name!r}")
    torch.set_float32_matmul_precision(name)


def matmul_precision(device: torch.device) -> str:
    """Return torch's precision of fp32 products on the device: one of `PRECISIONS`."""
    backend: Any = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    return {"bf16": "medium", "tf32": "high"}.get(backend.matmul.fp32_precision, "highest")


def machine(device: torch.device) -> dict:
    """Return what timings depend on besides the code: processor, cores, torch's threads and precision, device."""
    kind = {"cpu": processor(), "cores": os.cpu_count(), "threads": full_threads(), "device": str(device)}
    kind["matmul_precision"] = matmul_precision(device)
    return kind | ({"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {})
