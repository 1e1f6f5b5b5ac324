"""The tools of kernels. Without a GPU: every kernel compiles for Hopper, fits it as its parts are made for, and is
compiled once, as Triton brings its own assembler; the benchmark's cases can be computed, and results are on disk."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
import kernel_speed
from kernel_formulas import TINY, KernelCase, Shapes, cases

from specdec import ops as backends

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# Of an H100 or H200, in bytes: what a program may have, what a multiprocessor has, what it keeps for itself of each.
SHARED_MEMORY, SHARED_OF_ALL, RESERVED = 232_448, 228 * 1024, 1024
REGISTERS = 65_536  # of a multiprocessor


def lines_of(script: str, folder, *arguments: str) -> list[dict]:
    """What a script prints, from a process of its own in which the interpreter is off."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(ROOT), str(ROOT / "tests"), *filter(None, [environment.get("PYTHONPATH")])]
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    environment.setdefault("TRITON_CACHE_DIR", str(folder))
    command = [sys.executable, str(HERE / script), *arguments]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr[-2000:]
    return [json.loads(line) for line in out.stdout.splitlines()]


def test_every_kernel_compiles_and_fits(tmp_path, whole):
    """Nothing spills, products of bf16 run on the tensor cores, and as many programs are resident as parts are made
    for. All cases with --whole, otherwise the first ones that launch each kernel."""
    from specdec.ops.cuda import filtered_sampling, tree_attention

    compiled = lines_of("kernel_compile.py", tmp_path, *(() if whole else ("--few",)))
    defined = set()
    for path in (ROOT / "specdec" / "ops" / "cuda").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        names = re.findall(r"\n@triton\.jit(?:\([^)]*\))?\ndef (\w+)", text)
        assert len(names) == text.count("@triton.jit")
        defined |= {f"{path.stem}.{name}" for name in names if f"{name}[(" in text}  # kernels, not their functions
    assert len(defined) >= 11
    assert {line["kernel"] for line in compiled} == defined
    products = [x for x in compiled if x["kernel"] in ("tree_attention._tree_attention", "head_topk._blocks")]
    assert all(line["tensor_cores"] for line in products if "fp32" not in line["case"])
    resident = {"tree_attention._tree_attention": tree_attention.RESIDENT}
    resident |= dict.fromkeys(("filtered_sampling._scan", "filtered_sampling._list"), filtered_sampling.RESIDENT)
    for line in compiled:
        assert line["stack"] == 0, line
        assert line["shared"] <= SHARED_MEMORY, line
        programs = resident.get(line["kernel"], 1)
        assert programs * (line["shared"] + RESERVED) <= SHARED_OF_ALL, line
        assert programs * line["warps"] * 32 * -(-line["registers"] // 8) * 8 <= REGISTERS, line


@pytest.mark.matrix
@pytest.mark.parametrize("case", ["plain, sampled", "EAGLE-3, tree of 60", "EAGLE-3, tree of 60, graphs"])
def test_texts_of_any_length_take_the_same_few_variants(case, tmp_path, whole):
    """A text that is longer than a window of 512, and a second one. Of each call in a round attention has a few
    variants: the window hides something or not, the slots are cut or not. The merge has one each for 2, 4 and 8
    parts."""
    (line,) = lines_of("kernel_variants.py", tmp_path, "2000" if whole else "700", case)
    most = {"tree_attention._tree_attention": 4 if "plain" in case else 10, "tree_attention._merge": 3}
    most |= {"rms_norm._rms_norm": 2, "tree_level._tree_level": 2}  # with a residual; the last level
    variants = line["variants"]
    assert {"tree_attention._tree_attention", "rms_norm._rms_norm", "gated._gated"} <= set(variants)
    assert all(count <= most.get(kernel, 1) for kernel, count in variants.items()), variants
    assert line["more"] == 0


@pytest.mark.skipif("TRITON_INTERPRET" not in os.environ, reason="the kernels run on the GPU")
@torch.no_grad()
def test_every_case_of_the_kernels_can_be_computed():
    backends.use("triton")
    try:
        groups = cases(Shapes(torch.device("cpu"), **TINY), 8, 64).values()
        made = {name: case for make in groups for name, case in make().items()}
        assert set(backends.KERNELS) <= set(made)
        for case in made.values():
            case.kernel()
            case.eager()
    finally:
        backends.use("auto")


def test_kernels_are_on_disk_after_each(monkeypatch, tmp_path):
    def absent():
        raise ImportError("no such kernel")

    saved, file = [], tmp_path / "a.json"

    def made(*names: str):
        def make() -> dict[str, KernelCase]:
            saved.append(sorted(json.loads(file.read_text())["kernels"]) if file.exists() else [])
            return {name: KernelCase(lambda: None, lambda: None, moved=8) for name in names}

        return make

    monkeypatch.setattr(kernel_speed, "cases", lambda *sizes: {"a": made("a"), "b": absent, "c": made("c", "d")})
    monkeypatch.setattr(torch, "compile", lambda run, **how: run)
    result = kernel_speed.benchmark(Shapes(torch.device("cpu"), **TINY), 8, 64, file)
    assert saved == [[], ["a", "b"]]
    assert result == json.loads(file.read_text())
    assert sorted(result["kernels"]) == ["a", "b", "c", "d"]
    assert result["kernels"]["b"] == {"failed": "ImportError: no such kernel"}
    assert {"us", "gb_per_s", "share_of_ceiling"} <= set(result["kernels"]["d"]["kernel"])
    assert {"machine", "versions", "revision", "ceiling"} <= set(result)
