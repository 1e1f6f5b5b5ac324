"""Every kernel compiles for Hopper, which needs no GPU: Triton brings its own assembler."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SHARED_MEMORY = 232_448  # bytes that a program may have on an H100 or H200


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[str, dict]:
    """The compiler's report on each kernel, from a process of its own in which the interpreter is off."""
    cache = os.environ.get("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": cache}
    out = subprocess.run(
        [sys.executable, str(HERE / "kernel_compile.py")], env=environment, capture_output=True, text=True, check=False
    )
    assert out.returncode == 0, out.stderr[-2000:]
    return {line["kernel"]: line for line in map(json.loads, out.stdout.splitlines())}


def test_every_kernel_compiles(compiled):
    defined = set()
    for path in (ROOT / "specdec" / "kernels").glob("*.py"):
        for name in path.read_text(encoding="utf-8").split("\n@triton.jit\ndef ")[1:]:
            if f"{name.split('(')[0]}[(" in path.read_text(encoding="utf-8"):  # launched, not called from another
                defined.add(f"{path.stem}.{name.split('(')[0]}")
    assert len(defined) >= 9
    assert set(compiled) == defined


def test_shared_memory_suffices(compiled):
    for kernel, line in compiled.items():
        assert line["shared"] <= SHARED_MEMORY, kernel


def test_products_of_bf16_run_on_the_tensor_cores(compiled):
    assert compiled["tree_attention._tree_attention"]["tensor_cores"]
    assert compiled["head_topk._blocks"]["tensor_cores"]
