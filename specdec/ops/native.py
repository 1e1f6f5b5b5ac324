"""Operators in C++ for products of few rows, compiled where they run.

`native.cpp`: products with packed weights as operators over tensors, which compiled rounds can hold (docs/compile.md).
FBGEMM and oneDNN take a packed weight as an object of their own kind, and Inductor's graphs hold none of those. It puts
the object behind a tensor, its handle, and calls the same product with it.

    torch.ops.specdec.hold_fbgemm(packed)                           the handle of a weight that FBGEMM has packed
    torch.ops.specdec.hold_onednn(packed)                           ... that oneDNN has packed
    torch.ops.specdec.fbgemm_linear(x, handle, fewer_bits, size)    x [R,in] -> [R,size]
    torch.ops.specdec.onednn_linear(x, handle, bias, size)

`rows.cpp`: operators of its own, for processors with AVX2 or AVX-512, products with AMX too.

    torch.ops.specdec_rows.tiled(inputs, beside)                    whether such a weight is packed for AMX
    torch.ops.specdec_rows.group(inputs, beside)                    outputs that lie side by side in a packed weight
    torch.ops.specdec_rows.linear(x, weight, size)                  x [R,in] -> [R,size]
    torch.ops.specdec_rows.mlp(x, gate_up, down, size)
    torch.ops.specdec_rows.tree_attention(q, keys, values, lens, ancestors, nodes, scale)
    torch.ops.specdec_rows.rms_norm(x, weight, eps)                 x [...,H], and add_norm(x, y, weight, eps)
    torch.ops.specdec_rows.norm_pair(x, y, x_weight, y_weight, x_eps, y_eps)            two norms side by side
    torch.ops.specdec_rows.rotate(x, cos, sin)                      x [B,N,heads,Dh]
    torch.ops.specdec_rows.rope_write(rows, cos, sin, slots, keys, values, gains, eps)  as the kernel of that name
    torch.ops.specdec_rows.largest(x)                               the place of the largest [...], the first of equals
    torch.ops.specdec_rows.likeliest(logits)                        log-probability and token [...,1]
    torch.ops.specdec_rows.follow(tokens, parents, drawn, steps)    path [B,P], n [B], emitted tokens [B,P]
    torch.ops.specdec_rows.commit(memory, lens, path, n)            as the kernel of that name

Each is compiled once for each version of torch, of itself and of the processor, and kept in the user's cache.
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
    """Make the operators of `native.cpp` known to torch. ValueError, one sentence, if they cannot be compiled."""
    torch.ops.load_library(_library("native.cpp", SIMPLE))
    for name in ("fbgemm_linear", "onednn_linear"):
        torch.library.register_fake(f"specdec::{name}", _like)


def serves(x: Tensor) -> bool:
    """Whether the operators of `rows.cpp` may take tensors such as x: in fp32, where nothing learns."""
    return (
        x.dtype == torch.float32
        and x.device.type == "cpu"
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and has_rows()
    )


def bound(name: str, like: Tensor, *last: object) -> Callable[..., Any] | None:
    """Return an operator of `rows.cpp` as a function of all arguments but the `last`; None if it does not take tensors
    such as `like`."""
    if not serves(like):
        return None
    operator = getattr(torch.ops.specdec_rows, name).default._op
    return lambda *first: operator(*first, *last)


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
    """The library of a source, compiled unless it is kept."""
    text = b"".join(path.read_bytes() for path in (FOLDER / source, *sorted(FOLDER.glob("*.h"))))
    key = hashlib.sha256(b" ".join([text, *map(str.encode, (torch.__version__, *how, features()))])).hexdigest()[:16]
    library = kept_folder("compiled") / f"{Path(source).stem}-{key}.so"
    if not library.is_file():
        if sys.stderr.isatty():  # whoever waits at a terminal is told why
            print(f"note: compiling {source} for this processor, once, about 10 s", file=sys.stderr)
        keep(library, lambda library: _compile(FOLDER / source, how, library))
    return library


def _compile(source: Path, how: tuple[str, ...], library: Path) -> None:
    include = [f"-I{ROOT / 'include'}", f"-I{ROOT / 'include' / 'torch' / 'csrc' / 'api' / 'include'}"]
    made = library.with_suffix(".o")
    _run(source, *how, "-std=c++20", "-fPIC", "-w", *include, "-c", source, "-o", made)
    # With torch's own threads, if it brings them along: two sorts of them would wait for each other.
    threads = sorted((ROOT / "lib").glob("libgomp*.so*")) or [word for word in how if word == "-fopenmp"]
    _run(source, "-shared", made, "-o", library, f"-L{ROOT / 'lib'}", "-ltorch_cpu", "-lc10", *threads)
    made.unlink()


def _run(source: Path, *words: object) -> None:
    done = subprocess.run([compiler(), *map(str, words)], capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["?"]
        raise ValueError(f"the C++ compiler refuses {source.name}: {errors[0]}")
