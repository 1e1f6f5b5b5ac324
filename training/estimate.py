"""What a run will take, told before it starts:  python -m training.estimate SETTINGS-OF-training.train

Disk, memory and time of training with these settings, and of a cache of its features. Counts are exact; memory is said
twice, from shapes and as a real step on the largest batch measures it; times are those of three real steps. Nothing is
written.
"""

import copy
import itertools
import json
import math
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from specdec.cli.errors import one_sentence_errors
from specdec.cli.hydra_entry import hydra_command
from training.data import Batches
from training.features.feature_cache import STORES, Form, shard_bounds
from training.features.online import online_features
from training.loop.parallel import join_processes
from training.loop.trainer import Trainer
from training.objectives.losses import PIECE
from training.train import assemble

SHARD_TOKENS = 65536  # as in conf/cache.yaml
KEEPS = (None, 8, 64)
STEPS = 3
MEASURED = {"interpreter and libraries": "measured"}


@dataclass
class Plan:
    """What a run goes through, counted in all its processes. tokens: padding included, as the log counts them."""

    conversations: int
    epoch_batches: int
    epoch_tokens: int
    learnt_tokens: int  # of an epoch
    steps: int
    epochs: float
    tokens: int  # of the run
    largest: list[int]  # the batch with most padded tokens, as sample indices


def plan(trainer: Trainer) -> Plan:
    """Go through the batches of the whole run without making them."""
    data, config = trainer.data, trainer.config
    batches = config.steps * config.accumulate * trainer.processes.world
    epoch, sizes = len(data.epoch(0)), [0]
    largest: list[int] = []
    for indices in itertools.islice(data.order(), batches):
        size = math.prod(data.layout(indices)[1])
        largest = indices if size > max(sizes[-epoch:]) else largest
        sizes.append(size)
    return Plan(
        conversations=len(data.samples),
        epoch_batches=epoch,
        epoch_tokens=sum(math.prod(data.layout(indices)[1]) for indices in data.epoch(0)),
        learnt_tokens=sum(int(s.mask.sum()) for s in data.samples),
        steps=config.steps,
        epochs=batches / epoch,
        tokens=sum(sizes),
        largest=largest,
    )


def cache_bytes(trainer: Trainer) -> dict[tuple[str, int | None], int]:
    """What a cache of all conversations takes, by how states are stored and what is kept of the distribution."""
    samples = trainer.data.samples + (trainer.heldout.samples if trainer.heldout else [])
    shards, config = len(shard_bounds(samples, SHARD_TOKENS)), trainer.target.config
    keeps = [keep for keep in KEEPS if keep is None or keep < trainer.drafter.vocab.size]
    forms = (
        Form(store, keep, trainer.drafter.taps, config.hidden, config.layers) for store in STORES for keep in keeps
    )
    return {(form.store, form.keep): form.bytes(samples, shards) for form in forms}


def memory(trainer: Trainer, shape: tuple[int, int]) -> dict[str, int]:
    """Bytes of a step on a batch of this shape, from shapes alone. In several processes: of one of them with DDP."""
    target, drafter, config = trainer.target, trainer.drafter, trainer.config
    learning = [p for p in trainer.parameters.values() if p.requires_grad]
    moments = sum(
        p.nbytes * (1 if isinstance(optimizer, torch.optim.Muon) else 2)
        for optimizer, _ in trainer.optimizers.parts
        for group in optimizer.param_groups
        for p in group["params"]
    )
    states = (len(drafter.taps) + (target.config.layers not in drafter.taps)) * target.config.hidden
    return {
        "target": stored(target),
        "drafter": sum(p.nbytes for p in trainer.parameters.values()),
        "gradients": sum(p.nbytes for p in learning),
        "optimiser": moments,
        "averages": sum(p.nbytes for p in trainer.parameters.values()) * (2 if config.ema else 0),
        "features": math.prod(shape) * states * 4,
        "activations": saved_bytes(drafter, shape, trainer.objective.steps),
        "pieces of logits": 6 * 4 * PIECE,
    }


def stored(module: nn.Module) -> int:
    """Bytes of parameters and buffers; what is shared counts once."""
    tensors = itertools.chain(module.parameters(), module.buffers())
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def saved_bytes(drafter: nn.Module, shape: tuple[int, int], steps: int) -> int:
    """What the unroll over a batch [B,T] keeps for its backward pass, by running it on tensors without contents."""
    tensors = list(itertools.chain(drafter.parameters(), drafter.buffers()))
    twin = copy.deepcopy(drafter, {id(t): t for t in tensors})  # its tables of positions become ones without contents
    twin.documents = None
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        alive = [mode.from_tensor(t) for t in tensors]
        own = {t.untyped_storage()._cdata for t in alive}
        feats = torch.zeros(*shape, _width(drafter))
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            states = list(twin.unroll(feats, torch.zeros(shape, dtype=torch.int64), steps))
        total = sum(size for storage, size in kept.items() if storage not in own)
        return total + sum(state.readout.untyped_storage().nbytes() for state in states)  # and their gradients


def _width(drafter: nn.Module) -> int:
    return len(drafter.taps) * drafter.shape.hidden


@dataclass
class Measured:
    """Of a few real steps in this process."""

    peak: int | None  # bytes; None where the system does not tell
    seconds_a_token: float  # of a training step, padding counted
    features_seconds_a_token: float  # of the target alone


def measure(trainer: Trainer, largest: list[int]) -> Measured:
    """Take a step on the largest batch, to warm up and for the peak, and time the run's first ones. The trainer is of
    no use afterwards."""
    data, device = trainer.data, trainer.target.device
    clock = Clock(device)
    clock.reset_peak()
    trainer._step([data.collate(largest)])
    peak = clock.peak()
    batches = list(itertools.islice(data.iterate(), STEPS))
    tokens = sum(batch.tokens.numel() for batch in batches)
    seconds = sum(clock.seconds(lambda batch=batch: trainer._step([batch])) for batch in batches)
    how = trainer.drafter.taps, trainer.config.autocasting(device)
    features = sum(clock.seconds(lambda batch=batch: online_features(trainer.target, batch, *how)) for batch in batches)
    return Measured(peak, seconds / tokens, features / tokens)


class Clock:
    """Times and peaks of memory, of the GPU or of this process."""

    CLEAR = Path("/proc/self/clear_refs")

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"

    def seconds(self, work) -> float:
        start = time.perf_counter()
        work()
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def reset_peak(self) -> None:
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        elif self.CLEAR.exists() and os.access(self.CLEAR, os.W_OK):
            self.CLEAR.write_text("5")

    def peak(self) -> int | None:
        if self.cuda:
            return torch.cuda.max_memory_allocated()
        return process_memory("VmHWM")


def process_memory(what: str) -> int | None:
    """Bytes that this process has (VmRSS) or had at most (VmHWM); None where the system does not tell."""
    status = Path("/proc/self/status")
    rows = status.read_text().splitlines() if status.exists() else []
    return next((int(row.split()[1]) * 1024 for row in rows if row.startswith(what)), None)


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be taken, what this process has included; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    info = Path("/proc/meminfo")
    rows = dict(row.split(":") for row in info.read_text().splitlines()) if info.exists() else {}
    return int(rows["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in rows else None


def free_disk(folder: Path) -> int:
    """Of the disk on which `folder` would be made."""
    folder = folder.absolute()
    return shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists())).free


def estimate(trainer: Trainer, before: int = 0) -> dict:
    """Everything as one dictionary: counts, bytes and seconds. before: bytes of the interpreter and its libraries."""
    counted = plan(trainer)
    shape = trainer.data.layout(counted.largest)[1]
    measured = measure(trainer, counted.largest)  # before tensors without contents bring their own libraries
    parts = memory(trainer, shape) | {"interpreter and libraries": before}
    caches = cache_bytes(trainer)
    weights = parts["drafter"]
    checkpoint = weights + parts["optimiser"] + parts["averages"] // 2
    samples = trainer.data.samples + (trainer.heldout.samples if trainer.heldout else [])
    padded = Batches(samples, trainer.config.batch_tokens, seed=0)
    cached_tokens = sum(math.prod(padded.layout(indices)[1]) for indices in padded.by_length())
    return {
        "conversations": counted.conversations,
        "steps": counted.steps,
        "steps_an_epoch": counted.epoch_batches / (trainer.config.accumulate * trainer.processes.world),
        "epochs": round(counted.epochs, 3),
        "tokens": counted.tokens,
        "epoch_tokens": counted.epoch_tokens,
        "learnt_tokens": counted.learnt_tokens,
        "largest_batch": list(shape),
        "memory": parts,
        "peak_from_shapes": sum(parts.values()),
        "peak_measured": measured.peak,
        "cache": [{"store": store, "keep": keep or "all", "bytes": n} for (store, keep), n in caches.items()],
        "checkpoint": checkpoint,
        "run_disk": checkpoint * (trainer.config.keep + 1) + 2 * weights,
        "seconds_a_step": round(
            measured.seconds_a_token * counted.tokens / (counted.steps * trainer.processes.world), 4
        ),
        "seconds": round(measured.seconds_a_token * counted.tokens / trainer.processes.world, 1),
        "cache_seconds": round(measured.features_seconds_a_token * cached_tokens, 1),
        "on_policy": trainer.rollouts is not None,
        "free_disk": free_disk(trainer.out),
        "free_memory": free_memory(trainer.target.device),
    }


def warnings(report: dict) -> list[str]:
    """What will not fit, one sentence each."""
    found, free = [], report["free_disk"]
    if report["on_policy"]:
        found.append("the rollouts of data.on_policy are not in these figures: neither their text nor their time")
    if report["run_disk"] > free:
        found.append(f"the run's checkpoints take {size(report['run_disk'])}, and the disk has {size(free)} free")
    too_large = [f"{c['store']}/{c['keep']}" for c in report["cache"] if c["bytes"] > free]
    if too_large:
        found.append(f"of the caches {', '.join(too_large)} do not fit on the disk, which has {size(free)} free")
    peak = max(report["peak_measured"] or 0, report["peak_from_shapes"])
    if report["free_memory"] is not None and peak > report["free_memory"]:
        found.append(f"a step takes {size(peak)} of memory, and {size(report['free_memory'])} are free")
    return found


def size(count: int | None) -> str:
    if count is None:
        return "unknown"
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count / 1024:.1f} KiB"


def span(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes // 60)} h {int(minutes % 60)} min" if minutes >= 60 else f"{int(minutes)} min {rest:.0f} s"


def print_report(report: dict) -> None:
    table = Table(title="before anything starts", title_justify="left")
    for column in ("", "value", "known from"):
        table.add_column(column, justify="right" if column == "value" else "left")
    rows = [
        ("conversations", f"{report['conversations']:,}", "counted"),
        ("tokens an epoch, padded / learnt", f"{report['epoch_tokens']:,} / {report['learnt_tokens']:,}", "counted"),
        ("steps, epochs", f"{report['steps']:,}, {report['epochs']:.2f}", "counted"),
        ("tokens of the run, padded", f"{report['tokens']:,}", "counted"),
        ("time a step, mean", f"{report['seconds_a_step']:.2f} s", f"measured: {STEPS} steps"),
        ("time of the run", span(report["seconds"]), "measured steps; without evaluation and saving"),
        None,
        *((f"memory: {part}", size(count), MEASURED.get(part, "shapes")) for part, count in report["memory"].items()),
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
    Console(width=None if os.isatty(1) else 120).print(table)


@one_sentence_errors
def run(config: DictConfig) -> None:
    config.trainer.wandb = False
    before = process_memory("VmRSS") if config.device == "cpu" else 0
    report = estimate(assemble(config, join_processes(config.device)), before or 0)
    print_report(report)
    for warning in warnings(report):
        print(f"warning: {warning}", file=sys.stderr)
    print(json.dumps(report))


main = hydra_command(run, "train")

if __name__ == "__main__":
    main()
