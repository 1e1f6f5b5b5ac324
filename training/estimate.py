"""Print the disk space, memory and time that a run will take.

    specdec train estimate SETTINGS-OF-TRAIN

It prints disk, memory and time of training with these settings, and of a cache of the features. Counts are exact.
Memory is printed twice: from shapes, and as measured in a real step on the largest batch. Times are those of three
real steps. Nothing is written.
"""

import itertools
import json
import math
import sys

from omegaconf import DictConfig
from rich.table import Column, Table

from specdec import ranks
from specdec.cli.terminal import console
from specdec.training.data import Batches
from specdec.training.features.feature_cache import STORES, Form, shard_bounds
from specdec.training.loop import measure
from specdec.training.loop.parallel import join_processes
from specdec.training.loop.trainer import Trainer
from specdec.training.train import assemble

SHARD_TOKENS = 65536  # as in conf/cache.yaml
KEEPS = (None, 8, 64)
MEASURED = {"interpreter and libraries": "measured"}


def plan(trainer: Trainer) -> tuple[list[int], dict]:
    """Return the sample indices of the largest batch, and counts of the whole run. Tokens include padding."""
    data, config = trainer.data, trainer.config
    a_step = config.accumulate * trainer.processes.world
    batches, epoch = config.length * a_step, len(data.epoch(0))

    def tokens(indices: list[int]) -> int:
        return math.prod(data.layout(indices)[1])

    total, most = 0, 0
    largest: list[int] = []
    for indices in itertools.islice(data.order(), batches):
        size = tokens(indices)
        total += size
        if size > most:
            most, largest = size, indices
    return largest, {
        "conversations": len(data.samples),
        "steps": config.length,
        "steps_an_epoch": epoch / a_step,
        "epochs": round(batches / epoch, 3),
        "tokens": total,
        "epoch_tokens": sum(map(tokens, data.epoch(0))),
        "learnt_tokens": sum(int(s.mask.sum()) for s in data.samples),
        "largest_batch": list(data.layout(largest)[1]),
    }


def estimate(trainer: Trainer, before: int = 0) -> dict:
    """All figures in one dictionary: counts, bytes and seconds. before: bytes of the interpreter and its libraries."""
    largest, counts = plan(trainer)
    measured = measure.measure(trainer, largest)  # first: what counts from shapes loads libraries of its own
    parts = measure.step_bytes(trainer, tuple(counts["largest_batch"])) | {"interpreter and libraries": before}
    weights = parts["drafter"]
    checkpoint = weights + parts["optimiser"] + parts["averages"] // 2
    samples = trainer.data.samples + (trainer.heldout.samples if trainer.heldout else [])
    shards, sizes = len(shard_bounds(samples, SHARD_TOKENS)), trainer.target.config
    keeps = [keep for keep in KEEPS if keep is None or keep < trainer.drafter.vocab.size]
    kinds = itertools.product(STORES, keeps)
    forms = [Form(store, keep, trainer.drafter.taps, sizes.hidden, sizes.layers) for store, keep in kinds]
    padded = Batches(samples, trainer.config.batch_tokens, seed=0)
    cached_tokens = sum(math.prod(padded.layout(indices)[1]) for indices in padded.by_length())
    seconds = measured.seconds_a_token * counts["tokens"] / trainer.processes.world
    alone = measured.features_seconds_a_token
    return counts | {
        "memory": parts,
        "target_shared_by": measure.shared_target(trainer.target),
        "target_spread_over": measure.spread_target(trainer.target),
        "peak_from_shapes": sum(parts.values()),
        "peak_measured": measured.peak,
        "cache": [{"store": f.store, "keep": f.keep or "all", "bytes": f.bytes(samples, shards)} for f in forms],
        "checkpoint": checkpoint,
        "run_disk": checkpoint * (trainer.config.keep + 1) + 2 * weights,
        "seconds_a_step": round(seconds / counts["steps"], 4),
        "seconds": round(seconds, 1),
        "cache_seconds": alone and round(alone * cached_tokens, 1),
        "on_policy": trainer.rollouts is not None,
        "free_disk": measure.free_disk(trainer.out),
        "free_memory": measure.free_memory(trainer.target.device),
    }


def warnings(report: dict) -> list[str]:
    """One sentence for each thing that will not fit, or that the figures leave out."""
    found, free = [], report["free_disk"]
    if report["on_policy"]:
        found.append("the rollouts of data.on_policy are not in these figures: neither their text nor their time")
    if report["run_disk"] > free:
        found.append(f"the run's checkpoints take {size(report['run_disk'])}, and the disk has {size(free)} free")
    if too_large := [f"{c['store']}/{c['keep']}" for c in report["cache"] if c["bytes"] > free]:
        found.append(f"of the caches {', '.join(too_large)} do not fit on the disk, which has {size(free)} free")
    peak = max(report["peak_measured"] or 0, report["peak_from_shapes"])
    if report["free_memory"] is not None and peak > report["free_memory"]:
        found.append(f"a step takes {size(peak)} of memory, and {size(report['free_memory'])} are free")
    return found


def size(count: int | None) -> str:
    """Return a number of bytes in a readable unit, or 'unknown' for None."""
    if count is None:
        return "unknown"
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count / 1024:.1f} KiB"


def span(seconds: float | None) -> str:
    """Return a duration in hours and minutes, or in minutes and seconds, or 'unknown' for None."""
    if seconds is None:
        return "unknown"
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes // 60)} h {int(minutes % 60)} min" if minutes >= 60 else f"{int(minutes)} min {rest:.0f} s"


def print_report(report: dict) -> None:
    """Print a report as a table."""
    columns = "", Column("value", justify="right"), "known from"
    table = Table(*columns, title="before anything starts", title_justify="left")
    rows = [
        ("conversations", f"{report['conversations']:,}", "counted"),
        ("tokens an epoch, padded / learnt", f"{report['epoch_tokens']:,} / {report['learnt_tokens']:,}", "counted"),
        ("steps, epochs", f"{report['steps']:,}, {report['epochs']:.2f}", "counted"),
        ("tokens of the run, padded", f"{report['tokens']:,}", "counted"),
        ("time a step, mean", f"{report['seconds_a_step']:.2f} s", f"measured: {measure.STEPS} steps"),
        ("time of the run", span(report["seconds"]), "measured steps; without evaluation and saving"),
        None,
        *((f"memory: {part}", size(count), MEASURED.get(part, "shapes")) for part, count in report["memory"].items()),
        *(
            (f"memory: target, if {n} processes share it", size(count), "its plan in transformers")
            for n, count in report["target_shared_by"].items()
        ),
        *((f"memory: target, {place}", size(count), "shapes") for place, count in report["target_spread_over"].items()),
        ("memory, peak of a step", size(report["peak_from_shapes"]), "their sum, without what backward adds"),
        ("memory, peak of a step", size(report["peak_measured"]), "measured: the largest batch"),
        ("memory, free", size(report["free_memory"]), "measured"),
        None,
        ("a checkpoint", size(report["checkpoint"]), "shapes"),
        ("the run's folder", size(report["run_disk"]), "shapes"),
        *((f"cache, {c['store']}, keep={c['keep']}", size(c["bytes"]), "counted") for c in report["cache"]),
        ("time of making a cache", span(report["cache_seconds"]), "measured, the target alone"),
        ("disk, free", size(report["free_disk"]), "measured"),
    ]
    for row in rows:
        table.add_section() if row is None else table.add_row(*row)
    console(120).print(table)


def run(config: DictConfig) -> None:
    """Print the estimate for the composed settings of `specdec train estimate`."""
    config.trainer.logger = None
    before = measure.process_memory("VmRSS") if config.device == "cpu" else 0
    processes = join_processes(config.device, config.tp_plan)
    if config.tp_plan is not None:
        ranks.silence()
    report = estimate(assemble(config, processes), before or 0)
    print_report(report)
    for warning in warnings(report):
        print(f"warning: {warning}", file=sys.stderr)
    print(json.dumps(report))
