"""Products with packed weights as operators over tensors, which compiled rounds can hold (docs/compile.md).

FBGEMM and oneDNN take a packed weight as an object of their own kind, and Inductor's graphs hold none of those.
`native.cpp` puts the object behind a tensor, its handle, and calls the same product with it. It is compiled once for
each version of torch and of itself, and kept in the user's cache.

    torch.ops.specdec.hold_fbgemm(packed)                           the handle of a weight that FBGEMM has packed
    torch.ops.specdec.hold_onednn(packed)                           ... that oneDNN has packed
    torch.ops.specdec.fbgemm_linear(x, handle, fewer_bits, size)    x [R,in] -> [R,size]
    torch.ops.specdec.onednn_linear(x, handle, bias, size)
"""

import functools
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

from specdec.cli.files import keep, kept_folder

SOURCE = Path(__file__).with_name("native.cpp")


def compiler() -> str:
    """The C++ compiler: $CXX, or g++, or, on macOS, clang++. Raises ValueError if it is not there."""
    if sys.platform == "win32":
        raise ValueError("compiled rounds are not available on Windows: decode without --compile")
    name = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(name) is None:
        raise ValueError(f"a C++ compiler is needed to compile, and there is no {name}: install it, or name one in CXX")
    return name


@functools.cache
def load() -> None:
    """Make the operators known to torch. Raises ValueError, one sentence, if they cannot be compiled."""
    text = SOURCE.read_bytes()
    key = hashlib.sha256(text + torch.__version__.encode()).hexdigest()[:16]
    library = kept_folder("compiled") / f"native-{key}.so"
    if not library.is_file():
        keep(library, _compile)
    torch.ops.load_library(library)
    for name in ("fbgemm_linear", "onednn_linear"):
        torch.library.register_fake(f"specdec::{name}", _like)


def _like(x: Tensor, *rest) -> Tensor:
    return x.new_empty(x.shape[0], rest[-1])


def _compile(library: Path) -> None:
    root = Path(torch.__file__).parent
    include = [f"-I{root / 'include'}", f"-I{root / 'include' / 'torch' / 'csrc' / 'api' / 'include'}"]
    how = ["-O1", "-std=c++20", "-shared", "-fPIC", "-w", *include, str(SOURCE), "-o", str(library)]
    linked = [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"]
    done = subprocess.run([compiler(), *how, *linked], capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["?"]
        raise ValueError(f"the C++ compiler refuses {SOURCE.name}: {errors[0]}")
