"""Products with AMX, on processors without it: with the tiles in software, which leaves out the instructions alone.
These are only compiled."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specdec.model import native

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PRODUCTS = "is_the_product or beside_it or what_bf16_holds or amx or rows_are_rounded or gated_mlp or own_product"
USE = """
#include "amx.h"
#ifndef SPECDEC_AMX
#error these are the processor's flags, and AMX is left out
#endif
void use(const float* x, int64_t rows, int64_t in, int64_t parts, const void* weight, int64_t outputs, float* y) {
  amx::Rows(x, rows, in, parts).multiply(weight, outputs, y, outputs);
}
"""
needs_rows = pytest.mark.skipif(not native.has_rows(), reason="needs AVX2 or AVX-512, and a C++ compiler")


@needs_rows
@pytest.mark.skipif(not torch.cpu._is_avx512_bf16_supported(), reason="AMX stands beside AVX-512 with bf16")
def test_products_hold_with_the_tiles_of_amx_in_software():
    ours = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    command = [sys.executable, "-m", "pytest", HERE / "test_cpu_linear.py", "-k", PRODUCTS, "-p", "amx_in_software"]
    done = subprocess.run(command, cwd=ROOT, env=ours, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


@needs_rows
def test_the_instructions_of_amx_are_known_to_the_compiler(tmp_path):
    source = tmp_path / "use.cpp"
    source.write_text(USE)
    words = ["-std=c++20", "-O1", "-march=sapphirerapids", f"-I{native.FOLDER}", "-c", source, "-o", tmp_path / "use.o"]
    done = subprocess.run([native.compiler(), *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
