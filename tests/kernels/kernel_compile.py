"""Compile every kernel for compute capability 9.0, without a GPU, at the sizes of an 8B model; one JSON line each.

    python tests/kernels/kernel_compile.py            # all cases
    python tests/kernels/kernel_compile.py --few      # each kernel once

Registers and stack (bytes that did not fit into registers) are those of a thread, shared memory is that of a program,
in bytes. Triton's launcher runs as usual, with a driver that knows only its target, and a `run` that stops before the
launch.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from specdec.ops.cuda import (
    commit,
    filtered_sampling,
    gated,
    head_topk,
    norm_pair,
    rms_norm,
    rope_write,
    tree_attention,
    tree_level,
    tree_select,
)
from specdec.trees import DynamicTree


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
        line = {"kernel": name, "case": case[0], "registers": registers, "stack": stack}
        line |= {"shared": kernel.metadata.shared, "warps": kernel.metadata.num_warps}
        line["tensor_cores"] = "wgmma" in kernel.asm["ptx"] or "mma.sync" in kernel.asm["ptx"]
        print(json.dumps(line), flush=True)

    return instead


def bf16(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def attend(nodes: int, heads: int = 32, kv_heads: int = 8, dim: int = 128, dtype=torch.bfloat16, **how) -> Callable:
    keys, values = bf16(2, 1, 4096, kv_heads, dim).to(dtype).transpose(2, 3).unbind()
    ancestors = None if nodes == 1 else torch.zeros(1, nodes, nodes, dtype=torch.bool)
    q = bf16(1, nodes, heads, dim).to(dtype)
    return lambda: tree_attention.launch(q, keys, values, ints(1), ancestors, nodes, splits=8, **how)


def launches() -> dict[str, Callable]:
    """The calls that are compiled, by case. None runs, so the tensors may hold anything."""
    heads, kv_heads, dim, nodes, slots, w, pool = 32, 8, 128, 60, 4096, 10, DynamicTree.candidates(10, 8)
    x, weight, rows = bf16(nodes, 4096), bf16(4096), bf16(nodes, heads + 2 * kv_heads, dim)
    where = bf16(1, nodes, 1, dim), bf16(1, nodes, 1, dim), ints(nodes), *bf16(2, slots, kv_heads * dim)
    cache = ints(32), bf16(2, 1, slots, kv_heads, dim), ints(1)
    gains, seen = bf16(1, w, w).float(), ints(1, w, 3 * w).bool()
    level = gains[:, 0], ints(1, w), seen, gains, ints(1, w, w), 211
    candidates = ints(1, pool), bf16(1, pool).float(), ints(1, pool)
    logits, hidden, keys = bf16(nodes, 128256), bf16(w, 4096), ints(nodes, 2).int()
    return {
        "60 nodes": attend(60),
        "1 node": attend(1),
        "60 nodes, heads of 64": attend(60, dim=64),
        "60 nodes, heads of 256, window": attend(60, 4, 1, 256, depth=ints(1, 60), window=512),
        "60 nodes, fp32": attend(60, dtype=torch.float32),
        "norm": lambda: rms_norm.launch(x, weight, 1e-5),
        "residual and norm": lambda: rms_norm.launch(x, weight, 1e-5, residual=x),
        "two norms": lambda: norm_pair.launch(x, x, (x[0], x[0]), (1e-5, 1e-5)),
        "norms and rotation": lambda: rope_write.launch(rows, *where, bf16(2, dim), 1e-6),
        "rotation": lambda: rope_write.launch(rows, *where),
        "path of 64": lambda: commit.launch(*cache, ints(1, 64), ints(1)),
        "path of 8": lambda: commit.launch(*cache, ints(1, 8), ints(1)),
        "GeGLU": lambda: gated.launch(bf16(nodes, 2 * 14336), "gelu_tanh"),
        "SwiGLU": lambda: gated.launch(bf16(nodes, 2 * 14336), "silu"),
        "10 of 100": lambda: tree_level.launch(*level, w),
        "a last level": lambda: tree_level.launch(*level, 0),
        "60 of a pool": lambda: tree_select.launch(ints(1), *candidates, 60, 8),
        "10 of 32,000": lambda: head_topk.launch(hidden, bf16(32000, 4096), 10),
        "1 of 128,256": lambda: head_topk.launch(hidden[:1], bf16(128256, 4096), 1),
        "all filters, 8 parts": lambda: filtered_sampling.launch(logits, 0.7, 50, 0.9, 0.01, keys, parts=8),
        "top-p, 64 parts": lambda: filtered_sampling.launch(logits, 0.7, 0, 0.9, 0.0, keys, parts=64),
        "no filter, 8 parts": lambda: filtered_sampling.launch(logits, 0.7, 0, 1.0, 0.0, keys, parts=8),
    }


def main() -> None:
    driver.set_active(TargetOnly())
    case = [""]
    JITFunction.run = compile_only(JITFunction.run, case, few="--few" in sys.argv)
    for case[0], launch in launches().items():
        launch()


if __name__ == "__main__":
    main()
