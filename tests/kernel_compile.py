"""Compile every kernel for compute capability 9.0, without a GPU, at the sizes of an 8B model; one JSON line each.

    python tests/kernel_compile.py

registers and stack (bytes that did not fit into registers) are of a thread, shared memory of a program, in bytes.
Triton's launcher runs as ever, with a driver that knows its target only and a `run` that stops before the launch.
"""

import json
import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from specdec.kernels import (
    commit,
    filtered_sampling,
    gated,
    head_topk,
    rms_norm,
    rope_write,
    soft_cross_entropy,
    tree_attention,
)  # fmt: skip


class TargetOnly:
    """A driver for a device that is not there."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def compile_only(run):
    def instead(self, *args, grid, warmup, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
            usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
        module, ptx = self.fn.__module__.rsplit(".", 1)[1], kernel.asm["ptx"]
        line = {
            "kernel": f"{module}.{self.fn.__name__}",
            "registers": registers,
            "stack": stack,
            "shared": kernel.metadata.shared,
            "tensor_cores": "wgmma" in ptx or "mma.sync" in ptx,
        }
        print(json.dumps(line), flush=True)

    return instead


def bf16(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def main() -> None:
    driver.set_active(TargetOnly())
    JITFunction.run = compile_only(JITFunction.run)
    heads, kv_heads, dim, nodes, slots = 32, 8, 128, 60, 4096
    keys, values = bf16(2, 1, slots, kv_heads, dim).transpose(2, 3).unbind()
    words = torch.zeros(1, nodes, 2, dtype=torch.int32)
    tree_attention.launch(bf16(1, nodes, heads, dim), keys, values, ints(1), words, nodes, splits=8)
    rms_norm.launch(bf16(nodes, 4096), bf16(4096), 1e-5, residual=bf16(nodes, 4096))
    tables = bf16(nodes, dim), bf16(nodes, dim)
    flat = bf16(slots, kv_heads * dim), bf16(slots, kv_heads * dim)
    rope_write.launch(bf16(nodes, heads + 2 * kv_heads, dim), *tables, ints(nodes), *flat, bf16(2, dim), 1e-6)
    commit.launch(ints(32), bf16(2, 1, slots, kv_heads, dim), ints(1), ints(1, 8), ints(1))
    gated.launch(bf16(nodes, 2 * 14336), "silu")
    head_topk.launch(bf16(10, 4096), bf16(32000, 4096), 10)
    filtered_sampling.launch(bf16(nodes, 128256), 0.7, 50, 0.9, 0.01)
    soft_cross_entropy.launch(torch.empty(64, 7, 32000), torch.empty(64, 32000))


if __name__ == "__main__":
    main()
