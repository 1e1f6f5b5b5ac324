"""Each kernel on this GPU against eager PyTorch and `torch.compile`, beside what the GPU can do at best.

    python -m lab.bench.kernels --out kernels.json

The ceiling is measured: bytes/s of a copy of 1 GiB, FLOP/s of a bf16 product of 8192 x 8192 matrices. The shapes are
those of an 8B Llama that verifies a tree (`--nodes`) behind `--context` committed tokens. A time is the median over
`--trials` replays of a CUDA graph, the L2 cache overwritten before each, so that neither launches from Python nor a
warm cache count. gb_per_s counts what the formula must move, whatever an implementation moves. share_of_ceiling is the
larger of gb_per_s and tflop_per_s, to the measured best. compile_seconds is the first call under `torch.compile`. An
implementation that fails is named with its error, and the run goes on.

Writes one JSON file with device, versions and command; the last line of the output is the same object.
"""

import argparse
import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.cost.memory import size_of
from lab.output import write_json
from specdec.cli.errors import one_sentence_errors
from specdec.model.attention import attend, packed_mask, tree_mask
from specdec.model.layers import RMSNorm, rotate
from specdec.sampling.draws import draw
from specdec.sampling.filters import filtered_probs
from specdec.types import Sampling

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, DIM, VOCAB = 4096, 14336, 32, 8, 128, 128256
DTYPE = torch.bfloat16
Launch = Callable[[], object]


@dataclass
class KernelCase:
    """A formula on certain tensors, and what can compute it."""

    kernel: Launch
    eager: Launch
    moved: int  # bytes that the formula must read and write
    flops: int = 0
    others: dict[str, Launch] | None = None  # further backends, by name


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=DTYPE)


def size(*tensors: Tensor) -> int:
    return size_of(tensors)


def attention_case(nodes: int, context: int) -> KernelCase:
    """A tree behind a context: our kernel, SDPA with a dense mask, and FlexAttention, which finds the mask itself."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    from specdec.kernels import tree_attention

    slots = context + nodes
    q, kv = random(1, nodes, HEADS, DIM), random(2, 1, slots, KV_HEADS, DIM)
    keys, values = kv.transpose(2, 3).unbind()
    lens = torch.tensor([context], device="cuda")
    ancestors = torch.ones(1, nodes, nodes, device="cuda").tril().bool()
    groups = HEADS // KV_HEADS

    def visible(b, h, i, s):
        return (s < lens[b]) | ancestors[b, i, (s - lens[b]).clamp(0, nodes - 1)]

    blocks = create_block_mask(visible, 1, None, nodes, slots, device="cuda")
    flex = torch.compile(flex_attention)
    return KernelCase(
        lambda: tree_attention.launch(q, keys, values, lens, ancestors, nodes, slots=context),
        lambda: attend(q, keys, values, packed_mask(tree_mask(lens, ancestors, slots), groups, q.dtype)),
        moved=2 * size(q) + size(kv),
        flops=4 * nodes * HEADS * DIM * slots,
        others={"flex": lambda: flex(q.transpose(1, 2), keys, values, block_mask=blocks, enable_gqa=True)},
    )


def layer_cases(nodes: int) -> dict[str, KernelCase]:
    from specdec.kernels import gated, rms_norm, rope_write

    x, y, gate_up = random(nodes, HIDDEN), random(nodes, HIDDEN), random(nodes, 2 * INTERMEDIATE)
    norm = RMSNorm(HIDDEN, 1e-5).to("cuda", DTYPE)
    plain = norm.bind_eager()
    qkv, cos, sin = random(1, nodes, HEADS + 2 * KV_HEADS, DIM), random(1, nodes, 1, DIM), random(1, nodes, 1, DIM)
    keys, values = random(2, 4096, KV_HEADS * DIM)
    slots = torch.arange(nodes, device="cuda") + 100

    def add_norm() -> tuple[Tensor, Tensor]:
        total = x + y
        return total, plain(total)

    def rope() -> Tensor:
        q, k = rotate(qkv[:, :, : HEADS + KV_HEADS], cos, sin).split([HEADS, KV_HEADS], dim=2)
        keys.index_copy_(0, slots, k.reshape(nodes, -1))
        values.index_copy_(0, slots, qkv[:, :, HEADS + KV_HEADS :].reshape(nodes, -1))
        return q

    def gate() -> Tensor:
        a, b = gate_up.chunk(2, dim=-1)
        return F.silu(a) * b

    tables = cos.flatten(0, 2), sin.flatten(0, 2)
    return {
        "rms_norm": KernelCase(lambda: rms_norm.launch(x, norm.weight, 1e-5), lambda: plain(x), 2 * size(x)),
        "residual_rms_norm": KernelCase(
            lambda: rms_norm.launch(y, norm.weight, 1e-5, residual=x), add_norm, 4 * size(x)
        ),
        "rope_write": KernelCase(
            lambda: rope_write.launch(qkv[0], *tables, slots, keys, values), rope, 2 * size(qkv) + size(cos, sin)
        ),
        "gated": KernelCase(lambda: gated.launch(gate_up, "silu"), gate, size(gate_up) * 3 // 2),
    }


def commit_case(context: int, layers: int = 32, steps: int = 8) -> KernelCase:
    from specdec.model.cache import KVCache

    cache = KVCache(layers, 1, context + 64, KV_HEADS, DIM, torch.empty(0, dtype=DTYPE, device="cuda"))
    path = torch.arange(0, 2 * steps, 2, device="cuda")[None]
    n, none = torch.tensor([steps], device="cuda"), torch.tensor([0], device="cuda")
    source, destination = cache.slots_of(path[:, 1:]), cache.slots_of(torch.arange(1, steps, device="cuda"))

    def eager() -> None:
        for rows in cache.rows:
            rows.index_copy_(1, destination, rows.index_select(1, source))

    def kernel() -> None:
        cache.move(cache.addresses, cache.layers[0], none, path, n)

    return KernelCase(kernel, eager, moved=2 * layers * 2 * (steps - 1) * KV_HEADS * DIM * DTYPE.itemsize)


def vocabulary_cases(nodes: int, width: int = 8, drafts: int = 32000) -> dict[str, KernelCase]:
    from specdec.kernels import filtered_sampling, head_topk

    hidden, weight, logits = random(width, HIDDEN), random(drafts, HIDDEN) / 64, random(nodes, VOCAB) * 3
    sampling = Sampling(0.8, 50, 0.9, 0.0)
    filters = sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p

    def sampled(rows: Tensor) -> KernelCase:
        return KernelCase(
            lambda: filtered_sampling.launch(rows, *filters),
            lambda: draw(filtered_probs(rows, sampling), None),
            moved=size(rows),
        )

    return {
        "head_topk": KernelCase(
            lambda: head_topk.launch(hidden, weight, width),
            lambda: (hidden @ weight.T).float().log_softmax(-1).topk(width),
            moved=size(hidden, weight),
            flops=2 * width * HIDDEN * drafts,
        ),
        "filtered_sampling": sampled(logits),
        "filtered_sampling_of_a_row": sampled(logits[:1]),
    }


class Stopwatch:
    """Median seconds on the device, the L2 cache overwritten before each trial."""

    def __init__(self, trials: int):
        self.trials = trials
        self.sweep = torch.empty(1 << 28, dtype=torch.int8, device="cuda")

    def seconds(self, run: Launch) -> float:
        for _ in range(3):
            run()
        graph = captured(run)
        times = []
        for _ in range(self.trials):
            self.sweep.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1000)
        return statistics.median(times)


def captured(run: Launch) -> torch.cuda.CUDAGraph:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def measure(case: KernelCase, watch: Stopwatch, ceiling: dict[str, float]) -> dict:
    """Every implementation's time, rates and share of the ceiling."""
    torch.compiler.reset()
    compiled = torch.compile(case.eager, dynamic=False)
    start = time.perf_counter()
    line = {}
    try:
        compiled()
        torch.cuda.synchronize()
        line["compile_seconds"] = round(time.perf_counter() - start, 2)
    except Exception as error:  # a benchmark reports what a library cannot do, and goes on
        line["compile_seconds"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    ways = {"kernel": case.kernel, "eager": case.eager, "compile": compiled} | (case.others or {})
    for name, run in ways.items():
        try:
            seconds = watch.seconds(run)
        except Exception as error:
            line[name] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
            continue
        rates = {"gb_per_s": case.moved / seconds / 1e9, "tflop_per_s": case.flops / seconds / 1e12}
        share = max(rate / ceiling[unit] for unit, rate in rates.items())
        line[name] = {"us": seconds * 1e6} | rates | {"share_of_ceiling": share}
    times = {name: way["us"] for name, way in line.items() if isinstance(way, dict) and "us" in way}
    return line | {"fastest": min(times, key=times.get) if times else None}


def measured_ceiling(watch: Stopwatch) -> dict[str, float]:
    source, square = torch.empty(1 << 30, dtype=torch.int8, device="cuda"), random(8192, 8192)
    copy = torch.empty_like(source)
    return {
        "gb_per_s": 2 * source.numel() / watch.seconds(lambda: copy.copy_(source)) / 1e9,
        "tflop_per_s": 2 * 8192**3 / watch.seconds(lambda: square @ square) / 1e12,
    }


def rounded(value):
    if isinstance(value, dict):
        return {name: rounded(x) for name, x in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


@torch.no_grad()
def benchmark(nodes: int, context: int, trials: int) -> dict:
    import triton

    watch = Stopwatch(trials)
    ceiling = measured_ceiling(watch)
    cases = {"tree_attention": attention_case(nodes, context), "plain_attention": attention_case(1, context)}
    cases |= layer_cases(nodes) | {"commit": commit_case(context)} | vocabulary_cases(nodes)
    return {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()},
        "command": shlex.join(["python", "-m", "lab.bench.kernels", *sys.argv[1:]]),
        "shapes": {"nodes": nodes, "context": context, "dtype": str(DTYPE).removeprefix("torch.")},
        "ceiling": ceiling,
        "kernels": {name: measure(case, watch, ceiling) for name, case in cases.items()},
    }


@one_sentence_errors
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=60)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--out", type=Path, default=Path("kernels.json"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise ValueError("this benchmark needs a GPU, and torch sees none here")
    result = rounded(benchmark(args.nodes, args.context, args.trials))
    write_json(args.out, result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
