"""Operators in C++, compiled where they run: once for each version of torch, of the source and of the processor.

`cpu/rows.cpp` has operators of our own in fp32, for processors with AVX2 or AVX-512, products with AMX too. Its table
`TORCH_LIBRARY(specdec_rows, m)` lists them. `cpu/native.cpp` has products with weights that FBGEMM and oneDNN have
packed as operators over tensors. Those libraries take a packed weight as an object of their own kind, and Inductor's
graphs cannot hold such objects. So each packed weight is passed as a tensor, its handle.
"""

import functools
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.cli.files import keep, kept_folder
from specdec.machine import features

FOLDER = Path(__file__).parent / "cpu"
ROOT = Path(torch.__file__).parent
SIMPLE = ("-O1",)
FAST = ("-O3", "-march=native", "-fopenmp")
# By the name of an operator. Operators without an entry stay calls, or are torch's own.
SEEN: dict[str, Callable] = {}


def compiler() -> str:
    """Return the C++ compiler: $CXX, or g++, or, on macOS, clang++. Raises ValueError if there is none."""
    if sys.platform == "win32":
        raise ValueError("compiled rounds are not available on Windows: decode without --compile")
    name = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(name) is None:
        raise ValueError(f"a C++ compiler is needed to compile, and there is no {name}: install it, or name one in CXX")
    return name


@functools.cache
def load() -> None:
    """Make the operators of `native.cpp` known to torch. ValueError, one sentence, if they cannot be compiled."""
    torch.ops.load_library(_library("native.cpp", SIMPLE))
    for name in ("fbgemm_linear", "onednn_linear"):
        torch.library.register_fake(f"specdec::{name}", _like)


def serves(x: Tensor) -> bool:
    """Return whether the operators of `rows.cpp` may take tensors such as x: in fp32, where nothing learns."""
    return (
        x.dtype == torch.float32
        and x.device.type == "cpu"
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and has_rows()
    )


@functools.cache
def operator(name: str) -> Callable[..., Any]:
    """Return an operator of `rows.cpp`, without the Python wrapper that takes 1 us."""
    return getattr(torch.ops.specdec_rows, name).default._op


def seen_as(*names: str) -> Callable[[Callable], Callable]:
    """Let Inductor see what a function does in place of these operators.

    A function that returns NotImplemented leaves a call as it is.
    """

    def register(function: Callable) -> Callable:
        SEEN.update(dict.fromkeys(names, function))
        return function

    return register


@functools.cache
def has_rows() -> bool:
    """Whether there are the operators of `rows.cpp`, now known to torch: with AVX2 or AVX-512, and a C++ compiler."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return False
    try:
        torch.ops.load_library(_library("rows.cpp", FAST))
    except (ValueError, OSError):
        return False
    for name, like in (
        ("linear", _like),
        ("mlp", _like),
        ("tree_attention", lambda q, *rest: q.new_empty(*q.shape[:2], q.shape[2:].numel())),
        ("largest", lambda x: x.new_empty(x.shape[:-1], dtype=torch.int64)),
        ("likeliest", lambda x: (x.new_empty(*x.shape[:-1], 1), x.new_empty(*x.shape[:-1], 1, dtype=torch.int64))),
        ("follow", _followed),
    ):
        torch.library.register_fake(f"specdec_rows::{name}", like)
    return True


def _like(x: Tensor, *rest) -> Tensor:
    return x.new_empty(x.shape[0], rest[-1])


def _followed(tokens: Tensor, parents: Tensor, drawn: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    path = tokens.new_empty(len(tokens), steps + 1)
    return path, tokens.new_empty(len(tokens)), torch.empty_like(path)


def _library(source: str, how: tuple[str, ...]) -> Path:
    """Return the library of a source, compiled unless it is cached."""
    text = b"".join(path.read_bytes() for path in (FOLDER / source, *sorted(FOLDER.glob("*.h"))))
    key = hashlib.sha256(b" ".join([text, *map(str.encode, (torch.__version__, *how, features()))])).hexdigest()[:16]
    library = kept_folder("compiled") / f"{Path(source).stem}-{key}.so"
    if not library.is_file():
        if sys.stderr.isatty():  # explains the wait to an interactive user
            print(f"note: compiling {source} for this processor, once, about 10 s", file=sys.stderr)
        keep(library, lambda library: _compile(FOLDER / source, how, library))
    return library


def _compile(source: Path, how: tuple[str, ...], library: Path) -> None:
    include = [f"-I{ROOT / 'include'}", f"-I{ROOT / 'include' / 'torch' / 'csrc' / 'api' / 'include'}"]
    made = library.with_suffix(".o")
    _run(source, *how, "-std=c++20", "-fPIC", "-w", *include, "-c", source, "-o", made)
    # With torch's own threads, if it brings them along: two sorts of them would wait for each other.
    threads: list = sorted((ROOT / "lib").glob("libgomp*.so*")) or [word for word in how if word == "-fopenmp"]
    _run(source, "-shared", made, "-o", library, f"-L{ROOT / 'lib'}", "-ltorch_cpu", "-lc10", *threads)
    made.unlink()


def _run(source: Path, *words: object) -> None:
    done = subprocess.run([compiler(), *map(str, words)], capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["?"]
        raise ValueError(f"the C++ compiler refuses {source.name}: {errors[0]}")
