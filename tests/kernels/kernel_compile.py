"""Compile every kernel for compute capability 9.0, without a GPU, at the sizes of an 8B model; one JSON line each.

    python tests/kernels/kernel_compile.py            # all cases
    python tests/kernels/kernel_compile.py --few      # each kernel once

Registers and stack (bytes that did not fit into registers) are those of a thread, shared memory is that of a program,
in bytes. `launches` in each test file of the kernels names the kernels of a call. Triton's launcher runs as usual,
with a driver that knows only its target, and a `run` that stops before the launch.
"""

import importlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

HERE = Path(__file__).parent


class TargetOnly:
    """A driver for a device that is not there."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def compile_only(run, case: list[str], few: bool):
    done = set()

    def instead(self, *args, grid, warmup, **options):
        name = f"{self.fn.__module__.rsplit('.', 1)[1]}.{self.fn.__name__}"
        if few and name in done:
            return
        done.add(name)
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
            usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
        line = {
            "kernel": name,
            "case": case[0],
            "registers": registers,
            "stack": stack,
            "shared": kernel.metadata.shared,
            "warps": kernel.metadata.num_warps,
            "tensor_cores": "wgmma" in kernel.asm["ptx"] or "mma.sync" in kernel.asm["ptx"],
        }
        print(json.dumps(line), flush=True)

    return instead


def bf16(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def main() -> None:
    sys.path.insert(0, str(HERE.parent))
    driver.set_active(TargetOnly())
    case = [""]
    JITFunction.run = compile_only(JITFunction.run, case, few="--few" in sys.argv)
    for path in sorted(HERE.glob("test_kernels_*.py")):
        if "def launches(" in path.read_text(encoding="utf-8"):
            for case[0], launch in importlib.import_module(path.stem).launches(bf16, ints).items():
                launch()


if __name__ == "__main__":
    main()
