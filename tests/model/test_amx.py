"""amx.h compiles for a processor with AMX. test_cpu_linear.py compares its products, on such a processor only."""

import subprocess

import pytest

from specdec.ops import native

USE = """
#include "amx.h"
#ifndef SPECDEC_AMX
#error these are the processor's flags, and AMX is left out
#endif
void use(const float* x, int64_t rows, int64_t in, int64_t parts, const void* weight, int64_t outputs, float* y) {
  amx::Rows(x, rows, in, parts).multiply(weight, outputs, y, outputs);
}
"""


@pytest.mark.skipif(not native.has_rows(), reason="needs AVX2 or AVX-512, and a C++ compiler")
def test_the_instructions_of_amx_are_known_to_the_compiler(tmp_path):
    source = tmp_path / "use.cpp"
    source.write_text(USE)
    words = ["-std=c++20", "-O1", "-march=sapphirerapids", f"-I{native.FOLDER}", "-c", source, "-o", tmp_path / "use.o"]
    done = subprocess.run([native.compiler(), *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
