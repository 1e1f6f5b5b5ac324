"""Each kernel on this GPU against eager PyTorch and `torch.compile`, next to what the GPU can do at best.

    python tests/kernels/kernel_speed.py --out kernels.json
    python tests/kernels/kernel_speed.py --device cpu --tiny      # a rehearsal in Triton's interpreter, no measurement

The ceiling is measured: bytes/s of a copy of 1 GiB, FLOP/s of a bf16 product of 8192 x 8192 matrices. The shapes are
those of an 8B Llama that verifies a tree (`--nodes`) after `--context` committed tokens. A time is the median over
replays of a CUDA graph with an empty L2 cache (`triton.testing.do_bench`). gb_per_s counts what the formula must move,
whatever an implementation moves. share_of_ceiling is the larger of gb_per_s and tflop_per_s, to the measured best.
compile_seconds is the first call under `torch.compile`. An implementation that fails has its error as its result.

Writes one JSON file, again after each kernel.
"""

import argparse
import json
import statistics
import time
import timeit
from pathlib import Path

import torch
from interpreter import use_interpreter
from kernel_formulas import DTYPE, TINY, KernelCase, Run, Shapes, cases

from specdec import ops
from specdec.cli.errors import one_sentence_errors
from specdec.lab.output import provenance, sentence, write_json
from specdec.model.checkpoint import check_device

WARM_UPS = 3


def seconds(run: Run, device: torch.device) -> float:
    """Return the median seconds that the device works on `run`."""
    if device.type != "cuda":
        return statistics.median(timeit.repeat(run, number=1, repeat=3))
    from triton.testing import do_bench

    for _ in range(WARM_UPS):  # kernels are compiled, and libraries allocate what they need
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return do_bench(graph.replay, return_mode="median") / 1e3


def ceiling_of(s: Shapes) -> dict[str, float]:
    """Return the most GB/s and TFLOP/s that the device reaches."""
    source, square = torch.empty(s.copied, dtype=torch.int8, device=s.device), s.random(s.square, s.square)
    copy = torch.empty_like(source)
    return {
        "gb_per_s": 2 * source.numel() / seconds(lambda: copy.copy_(source), s.device) / 1e9,
        "tflop_per_s": 2 * s.square**3 / seconds(lambda: square @ square, s.device) / 1e12,
    }


def measure(case: KernelCase, ceiling: dict[str, float], device: torch.device) -> dict:
    """Return every implementation's time, rates and share of the ceiling, or its error."""
    torch.compiler.reset()
    compiled = torch.compile(case.eager, dynamic=False)
    line: dict = {}
    for name, run in ({"kernel": case.kernel, "eager": case.eager, "compile": compiled} | case.others).items():
        try:
            if name == "compile":
                start = time.perf_counter()
                run()
                line["compile_seconds"] = round(time.perf_counter() - start, 2)
            taken = seconds(run, device)
        except Exception as error:  # a benchmark reports a library's failure and continues
            line[name] = {"error": sentence(error)}
            continue
        rates = {"gb_per_s": case.moved / taken / 1e9, "tflop_per_s": case.flops / taken / 1e12}
        share = max(rate / ceiling[unit] for unit, rate in rates.items())
        line[name] = {"us": 1e6 * taken} | rates | {"share_of_ceiling": share}
    times = {name: found["us"] for name, found in line.items() if isinstance(found, dict) and "us" in found}
    return line | {"fastest": min(times, key=times.__getitem__) if times else None}


@torch.no_grad()
def benchmark(s: Shapes, nodes: int, context: int, path: Path) -> dict:
    """Measure all cases. The file holds the result so far after each."""
    import triton

    ceiling, kernels = ceiling_of(s), {}
    result = provenance(s.device) | {"ceiling": ceiling, "kernels": kernels}
    result["versions"] |= {"triton": triton.__version__}
    result["shapes"] = {"nodes": nodes, "context": context, "dtype": str(DTYPE).removeprefix("torch.")}
    for group, make in cases(s, nodes, context).items():
        try:
            for name, case in make().items():
                kernels[name] = measure(case, ceiling, s.device)
                print(f"{name}: {json.dumps(kernels[name])}", flush=True)
                write_json(path, result)
        except Exception as error:  # a group that cannot be made leaves the others
            kernels[group] = {"failed": sentence(error)}
            write_json(path, result)
    return result


@one_sentence_errors
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=60)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes: a rehearsal")
    parser.add_argument("--out", type=Path, default=Path("kernels.json"))
    args = parser.parse_args()
    device = check_device(args.device)
    if device.type != "cuda":
        use_interpreter()
        ops.use("triton")
    benchmark(Shapes(device, **TINY if args.tiny else {}), args.nodes, args.context, args.out)


if __name__ == "__main__":
    main()
