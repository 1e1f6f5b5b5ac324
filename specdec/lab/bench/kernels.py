"""Each kernel on this GPU against eager PyTorch and `torch.compile`, next to what the GPU can do at best.

    python -m specdec.lab.bench.kernels --out kernels.json
    python -m specdec.lab.bench.kernels --device cpu --tiny      # a rehearsal in Triton's interpreter, no measurement

The ceiling is measured: bytes/s of a copy of 1 GiB, FLOP/s of a bf16 product of 8192 x 8192 matrices. The shapes are
those of an 8B Llama that verifies a tree (`--nodes`) after `--context` committed tokens. A time is the median over
`--trials` replays of a CUDA graph, the L2 cache overwritten before each, so that neither launches from Python nor a
warm cache count. gb_per_s counts what the formula must move, whatever an implementation moves. share_of_ceiling is the
larger of gb_per_s and tflop_per_s, to the measured best. compile_seconds is the first call under `torch.compile`. An
implementation that fails is named with its error, and the run continues.

Writes one JSON file with device, versions and command, again after each kernel; the last line of the output is the same
object.
"""

import argparse
import json
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from specdec import ops
from specdec.cli.errors import one_sentence_errors
from specdec.lab.bench.formulas import DTYPE, TINY, KernelCase, Shapes, cases
from specdec.lab.bench.interpreter import use_interpreter
from specdec.lab.bench.memory import Run, captured, device_seconds, wait
from specdec.lab.machine import provenance
from specdec.lab.output import Report, sentence
from specdec.model.checkpoint import check_device


class Bench:
    """Measures cases on a device. ceiling: the most GB/s and TFLOP/s that it reaches."""

    def __init__(self, s: Shapes, trials: int):
        self.device, self.trials = s.device, trials
        self.sweep = torch.empty(s.sweep, dtype=torch.int8, device=s.device)
        source, square = torch.empty(s.copied, dtype=torch.int8, device=s.device), s.random(s.square, s.square)
        copy = torch.empty_like(source)
        self.ceiling = {
            "gb_per_s": 2 * source.numel() / self.seconds(lambda: copy.copy_(source)) / 1e9,
            "tflop_per_s": 2 * s.square**3 / self.seconds(lambda: square @ square) / 1e12,
        }

    def seconds(self, run: Run) -> float:
        """Median seconds on the device, the L2 cache overwritten before each trial."""
        return device_seconds(captured(run, self.device), self.device, self.trials, before=self.sweep.zero_)

    def measure(self, case: KernelCase | Exception) -> dict:
        """Return every implementation's time, rates and share of the ceiling. Raises the error of a case that could not
        be made.
        """
        if isinstance(case, Exception):
            raise case
        torch.compiler.reset()
        compiled, start = torch.compile(case.eager, dynamic=False), time.perf_counter()
        line: dict[str, Any] = {}
        try:
            compiled()
            wait(self.device)
            line["compile_seconds"] = round(time.perf_counter() - start, 2)
        except Exception as error:  # a benchmark reports a library's failure and continues
            line["compile_seconds"] = sentence(error)
        times: dict[str, float] = {}
        ways = {"kernel": case.kernel, "eager": case.eager, "compile": compiled}
        for name, run in (ways | case.others).items():
            try:
                seconds = self.seconds(run)
            except Exception as error:
                line[name] = {"error": sentence(error)}
                continue
            rates = {"gb_per_s": case.moved / seconds / 1e9, "tflop_per_s": case.flops / seconds / 1e12}
            share = max(rate / self.ceiling[unit] for unit, rate in rates.items())
            line[name], times[name] = {"us": seconds * 1e6} | rates | {"share_of_ceiling": share}, seconds
        return rounded(line | {"fastest": min(times, key=times.__getitem__) if times else None})


def rounded(value):
    if isinstance(value, dict):
        return {name: rounded(x) for name, x in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


@torch.no_grad()
def benchmark(s: Shapes, nodes: int, context: int, trials: int, path: Path) -> dict:
    """Measure all cases. The file holds the result so far after each."""
    import triton

    bench = Bench(s, trials)
    result = provenance(s.device) | {"ceiling": rounded(bench.ceiling)}
    result["versions"] |= {"triton": triton.__version__}
    result["shapes"] = {"nodes": nodes, "context": context, "dtype": str(DTYPE).removeprefix("torch.")}
    report = Report(path, result)
    for group, make in cases(s, nodes, context).items():
        try:
            made: Mapping[str, Any] = make()
        except Exception as error:
            made = {group: error}
        for name, case in made.items():
            report.add(name, partial(bench.measure, case), "kernels")
    return report.content


@one_sentence_errors
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=60)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes: a rehearsal")
    parser.add_argument("--out", type=Path, default=Path("kernels.json"))
    args = parser.parse_args()
    device = check_device(args.device)
    if device.type != "cuda":
        use_interpreter()
        ops.use("triton")
    shapes = Shapes(device, **TINY if args.tiny else {})
    print(json.dumps(benchmark(shapes, args.nodes, args.context, args.trials, args.out)))


if __name__ == "__main__":
    main()
