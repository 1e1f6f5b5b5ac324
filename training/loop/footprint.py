"""Bytes that a training step takes, from shapes alone."""

import copy
import itertools
import math
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from specdec.contracts import Drafter
from specdec.model.names import resolve
from specdec.training.loop.trainer import Trainer
from specdec.training.loop.weights import is_shard
from specdec.training.objectives.losses import LEAST_ROWS, PIECE

SHARES = (2, 4, 8)  # numbers of processes that an estimate covers


def step_bytes(trainer: Trainer, shape: tuple[int, int]) -> dict[str, int]:
    """Return the bytes of each part of a step on a batch of this shape [B,T].

    With several processes, whether DDP or a shared target, these are the bytes of one process.
    """
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
    """Return the bytes of the target's weights in each of several processes that share it.

    The keys are the numbers of processes by which the heads can be divided. The result is {} for quantised weights, and
    for targets for which transformers has no plan.
    """
    from transformers import AutoConfig

    from specdec.model.hf_parallel import misfit, shares, sketch

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
    """Return the bytes of the target's weights by device, or {} if all are on one device.

    'elsewhere' are weights that a device_map has put into host memory or on disk. They are loaded for a layer's
    forward.
    """
    found: dict[str, int] = {}
    for parameter in target.parameters():
        place = "elsewhere" if parameter.device.type == "meta" else str(parameter.device)
        found[place] = found.get(place, 0) + parameter.nbytes
    return found if len(found) > 1 else {}


def saved_bytes(drafter: Drafter, shape: tuple[int, int], objective) -> int:
    """Return the bytes that an objective's unroll over a batch [B,T] stores for its backward pass.

    The unroll runs on tensors without contents.
    """
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
        feats = torch.zeros(*shape, _width(drafter))
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            readouts = objective.readouts(twin, feats, torch.zeros(shape, dtype=torch.int64))
        total = sum(size for storage, size in storages.items() if storage not in own)
        return total + sum(readout.untyped_storage().nbytes() for readout in readouts)  # and their gradients


def _width(drafter: Drafter) -> int:
    shape: Any = drafter.shape
    return len(drafter.taps) * (drafter.tap_width or shape.hidden)
