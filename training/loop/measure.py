"""The bytes of a training step from shapes alone, its seconds and bytes as measured here, and free memory and disk."""

import copy
import itertools
import math
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from specdec.contracts import Drafter
from specdec.model.ends import TargetEnds
from specdec.model.names import resolve
from specdec.training.features.online import online_features
from specdec.training.loop.parallel import is_shard
from specdec.training.loop.trainer import Trainer
from specdec.training.objectives.losses import LEAST_ROWS, PIECE

SHARES = (2, 4, 8)  # numbers of processes that an estimate covers
STEPS = 3  # that are timed
CLEAR = Path("/proc/self/clear_refs")  # 5 restarts the measurement of this process's peak memory


def step_bytes(trainer: Trainer, shape: tuple[int, int]) -> dict[str, int]:
    """Return the bytes in one process of each part of a step on a batch of this shape [B,T]."""
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
        "activations": saved_bytes(drafter, shape, trainer.objective),
        "pieces of logits": 6 * 4 * max(PIECE, LEAST_ROWS * (drafter.block or 1) * drafter.vocab.size),
    }


def stored(module: Any) -> int:
    """Bytes of a module's parameters and buffers in this process. Storage that is shared counts once."""
    held = [x.to_local() if is_shard(x) else x for x in (*module.parameters(), *module.buffers())]
    tensors = [x for x in held if x.device.type != "meta"]  # what a device_map has put elsewhere
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def shared_target(target) -> dict[int, int]:
    """Return the bytes of the target's weights in each process that shares it, by a number of processes that fits.

    {} for quantised weights, and for targets for which transformers has no plan.
    """
    from transformers import AutoConfig

    from specdec.model.hf_devices import misfit, shares, sketch

    config = AutoConfig.from_pretrained(resolve(target.name), trust_remote_code=False)
    text = config.get_text_config(decoder=True)
    if getattr(config, "quantization_config", None):
        return {}
    model = sketch(text)
    if not model.tp_plan:
        return {}
    cut, whole = shares(model, target.dtype.itemsize)
    return {n: cut // n + whole for n in SHARES if misfit(text, model.tp_plan, n) is None}


def spread_target(target) -> dict[str, int]:
    """Return the bytes of the target's weights by device, {} if all are on one. 'elsewhere': host memory or disk."""
    found: dict[str, int] = {}
    for parameter in target.parameters():
        place = "elsewhere" if parameter.device.type == "meta" else str(parameter.device)
        found[place] = found.get(place, 0) + parameter.nbytes
    return found if len(found) > 1 else {}


def saved_bytes(drafter: Drafter, shape: tuple[int, int], objective) -> int:
    """Return the bytes that an objective's unroll over a batch [B,T] stores for its backward pass."""
    tensors = list(itertools.chain(drafter.parameters(), drafter.buffers()))
    twin = copy.deepcopy(drafter, {id(t): t for t in tensors})  # its tables of positions become ones without contents
    twin.documents = None
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        alive = [mode.from_tensor(t) for t in tensors]
        own = {t.untyped_storage()._cdata for t in alive}
        sizes: Any = drafter.shape
        feats = torch.zeros(*shape, len(drafter.taps) * (drafter.tap_width or sizes.hidden))
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            readouts = objective.readouts(twin, feats, torch.zeros(shape, dtype=torch.int64))
        total = sum(size for storage, size in storages.items() if storage not in own)
        return total + sum(readout.untyped_storage().nbytes() for readout in readouts)  # and their gradients


@dataclass
class Measured:
    """A few real steps in this process."""

    peak: int | None  # bytes, on the GPU or of this process; None if the system does not report it
    seconds_a_token: float  # of a training step, padding counted
    features_seconds_a_token: float | None  # of the target's forward alone; None where its layers are not loaded


def measure(trainer: Trainer, largest: list[int]) -> Measured:
    """Take a step on the largest batch, given as sample indices, for the peak, and time the run's first steps.

    The trainer cannot be used afterwards: its weights have changed.
    """
    data, device = trainer.data, trainer.target.device
    cuda = device.type == "cuda"

    def seconds(work) -> float:
        start = time.perf_counter()
        work()
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    if cuda:
        torch.cuda.reset_peak_memory_stats()
    elif os.access(CLEAR, os.W_OK):
        CLEAR.write_text("5")
    trainer._step([data.collate(largest)])
    peak = torch.cuda.max_memory_allocated() if cuda else process_memory("VmHWM")
    batches = list(itertools.islice(data.iterate(), STEPS))
    tokens = sum(batch.tokens.numel() for batch in batches)
    spent = sum(seconds(lambda batch=batch: trainer._step([batch])) for batch in batches)
    taps, autocast = trainer.drafter.taps, trainer.config.autocasting(device)
    if isinstance(trainer.target, TargetEnds):
        return Measured(peak, spent / tokens, None)
    features = sum(
        seconds(lambda batch=batch: online_features(trainer.target, batch, taps, autocast)) for batch in batches
    )
    return Measured(peak, spent / tokens, features / tokens)


def process_memory(what: str) -> int | None:
    """Bytes that this process has (VmRSS) or had at most (VmHWM); None if the system does not report it."""
    status = Path("/proc/self/status")
    rows = status.read_text().splitlines() if status.exists() else []
    return next((int(row.split()[1]) * 1024 for row in rows if row.startswith(what)), None)


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be allocated, including this process's own; None if the system does not report it."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    info = Path("/proc/meminfo")
    rows = dict(row.split(":") for row in info.read_text().splitlines()) if info.exists() else {}
    return int(rows["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in rows else None


def free_disk(folder: Path) -> int:
    """Bytes that are free on the disk on which `folder` would be made."""
    folder = folder.absolute()
    return shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists())).free
