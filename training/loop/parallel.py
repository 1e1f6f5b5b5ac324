"""One process or many: their numbers, how they share gradients, sums over all of them, and full tensors of shards.

Start several with `torchrun --nproc-per-node=N -m specdec train ...`, or, on GPUs, `accelerate launch -m ...`.
accelerate joins them, wraps the module (DDP), holds gradients back while they accumulate, sums and gathers. Three
things stay ours or torch's own:

- FSDP is torch's `fully_shard`. Between CPU processes accelerate makes DDP of it, without a word.
- Batches and optimisers are not prepared. Which batch a process takes, and the update made of all gradients, must be
  those of one process with as many batches.
- `full` gathers shards. accelerate does it for a model's weights only, and moments and averages need it too.

accelerate and torch's FSDP are imported where there are several processes, as that takes a second or more.
"""

import copy
import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from specdec.training.objectives.teacher import TeacherLogits

if TYPE_CHECKING:
    from accelerate import Accelerator

Module = TypeVar("Module", bound=nn.Module)


def is_shard(value: Any) -> bool:
    """Return whether a process holds only a part of this tensor (DTensor).

    A process that shards has already imported torch's module for it. The others avoid the import, which takes a second.
    """
    tensor = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and isinstance(value, tensor.DTensor)


def full(value):
    """The value with full tensors in place of shards, through dicts and lists; every process must call it."""
    if is_shard(value):
        return value.full_tensor()
    if isinstance(value, dict):
        return {key: full(item) for key, item in value.items()}
    return [full(item) for item in value] if isinstance(value, list | tuple) else value


def sharded_as(value: Tensor, like: Any) -> Tensor:
    """A full tensor, cut into shards as `like` is, if that is cut."""
    if not is_shard(like):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)


def shell(drafter: Module) -> Module:
    """A second drafter of the same kind, with parameters of its own. Buffers, which are the target's, are shared."""
    return copy.deepcopy(drafter, {id(buffer): buffer for buffer in drafter.buffers()})


def fill(shell: nn.Module, weights: Mapping[str, Tensor], here: bool = True) -> None:
    """Give a shell these weights, as full tensors. It shares their memory where nothing need be gathered or cast.

    here: whether this process wants them; every process must call it, as gathering takes all.
    """
    own = dict(shell.named_parameters())
    for name, weight in weights.items():
        value = full(weight.detach())
        if here:
            own[name].data = value.to(own[name].dtype)


class Learner(nn.Module):
    """The objective over the drafter as one module, for DDP and FSDP to wrap."""

    def __init__(self, drafter: nn.Module, objective):
        """Combine a drafter and its objective."""
        super().__init__()
        self.drafter, self.objective = drafter, objective

    @override
    def forward(self, **features: Tensor | TeacherLogits) -> tuple[Tensor, dict[str, Tensor]]:
        return self.objective(self.drafter, **features)


class Processes:
    """A process alone: number `rank` of `world`, and its device. What several do together it does at once.

    A process that is `main` prints and writes. One that `evaluates` computes held-out losses for all.
    """

    def __init__(self, rank: int = 0, world: int = 1, device: str = "cpu"):
        """Number 0 is the main process."""
        self.rank, self.world, self.device = rank, world, device
        self.main = self.evaluates = rank == 0

    def wait(self) -> None:
        """Until all processes that evaluate are here."""

    def wrap(self, module: nn.Module, fsdp: bool) -> nn.Module:
        """The module as all processes train it; its parameters stay where they are, as shards (DTensor) if fsdp."""
        return module

    def accumulating(self, module: nn.Module, last: bool) -> AbstractContextManager:
        """Return the context for one of several batches of a step; gradients are shared with the `last` one."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Gradients of the sum of all processes' losses; with several processes, divided by their number."""
        loss.backward()

    def sum(self, values: Tensor) -> Tensor:
        """Over all processes, element by element; every process must call it."""
        return values

    def gather(self, own: list) -> list:
        """The items of all processes' lists, those of process 0 first; every process must call it."""
        return own


class Together(Processes):
    """One of several processes, by way of accelerate."""

    reduction = "sum"

    def __init__(self, accelerator: "Accelerator", device: str):
        """Take the process numbers from accelerate."""
        super().__init__(accelerator.process_index, accelerator.num_processes, device)
        self.accelerator = accelerator

    @override
    def wrap(self, module: nn.Module, fsdp: bool) -> nn.Module:
        if fsdp and self.world == 1:
            raise ValueError("trainer.fsdp=true contradicts tp_plan: every process trains the same drafter")
        if fsdp:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            fully_shard(module, mesh=init_device_mesh(torch.device(self.device).type, (self.world,)))
            return module
        # Buffers are the target's, the same everywhere: sending them along would cost more than the gradients.
        buffers = [name for name, _ in module.named_buffers()]
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, buffers)
        return self.accelerator.prepare_model(module)

    @override
    def accumulating(self, module: nn.Module, last: bool) -> AbstractContextManager:
        from torch.distributed.fsdp import FSDPModule

        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(last)
            return nullcontext()
        return nullcontext() if last else self.accelerator.no_sync(module)

    @override
    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

    @override
    def sum(self, values: Tensor) -> Tensor:
        return self.accelerator.reduce(values, self.reduction)

    @override
    def gather(self, own: list) -> list:
        from accelerate.utils import gather_object

        return own if self.world == 1 else gather_object(own)


class Replicas(Together):
    """Represent one of several processes that share one target and train the same drafter on the same batches.

    Gradients are averaged too: the order of a GPU's sums is random, and the drafters would drift apart.
    """

    reduction = "mean"  # of equal values; whether any process is asked to stop is above 0

    def __init__(self, accelerator: "Accelerator", device: str):
        """Set `rank` and `world` to those of a process alone, so that all processes load the same data."""
        super().__init__(accelerator, device)
        self.rank, self.world, self.evaluates = 0, 1, True

    @override
    def wait(self) -> None:
        self.accelerator.wait_for_everyone()


def join_processes(device: str, tp_plan: str | None = None) -> Processes:
    """Join the processes that a launcher started, or return a single process without a launcher.

    They communicate over gloo on the CPU, and over nccl on GPUs, with one GPU each. With a `tp_plan` they share one
    target; otherwise each has its own. Raises ValueError if the launcher sets what trainer.fsdp sets here.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return Processes(device=device)
    from accelerate import Accelerator, DistributedDataParallelKwargs
    from accelerate.utils import GradientAccumulationPlugin

    for name in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        if os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() == "true":
            raise ValueError(f"the launcher asks for {name}: launch without it; trainer.fsdp=true shards the drafter")
    accelerator = Accelerator(
        cpu=device == "cpu",
        # The launcher's settings of these must not change a run: conf/trainer has them.
        mixed_precision="no",
        dynamo_backend="no",
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        # A drafter of more heads than the objective has steps leaves some unused.
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
    )
    return (Replicas if tp_plan else Together)(accelerator, "cpu" if device == "cpu" else str(accelerator.device))


@dataclass
class Sums:
    """Sums of the values of several batches, each weighted by its number of counted positions, for means over all."""

    total: Tensor | None = None  # fp64: weight, loss, stop, padded and learnt tokens, the metrics, flat, their weights
    shapes: dict[str, torch.Size] = field(default_factory=dict)

    def add(self, mask: Tensor, loss: Tensor, metrics: dict[str, Tensor], stop: bool = False) -> Tensor:
        """Add the loss [] and metrics of a batch, weighted by its number of counted positions [], which is returned."""
        weight = metrics.pop("counted", mask.sum()).to(loss)
        by = metrics.pop("counts", weight)
        self.shapes = {name: value.shape for name, value in metrics.items()}
        means = torch.cat([value.detach().flatten() for value in metrics.values()])
        counts = weight.new_tensor([stop, mask.numel(), mask.count_nonzero()])
        head = torch.cat([torch.stack([weight, loss.detach() * weight]), counts])
        flat = torch.cat([head, means * by.flatten(), by.flatten().expand_as(means)]).double()
        self.total = flat if self.total is None else self.total + flat
        return weight

    def means(self, processes: Processes) -> tuple[float, float, bool, tuple[int, int], dict[str, Tensor]]:
        """Return means over all processes, each of which must call this.

        These are the number of counted positions, the mean loss, whether any process was asked to stop, the numbers of
        padded and of training tokens, and the mean metrics.
        """
        if self.total is None:
            raise ValueError("there is nothing to take the mean of")
        total = processes.sum(self.total).cpu()
        weight, loss, stop, tokens, learnt = total[:5].tolist()
        sums, counts = total[5:].chunk(2)
        parts = (sums / counts.clamp(min=1e-6)).split([shape.numel() for shape in self.shapes.values()])
        metrics = {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}
        return weight, loss / (weight or 1), stop > 0, (int(tokens), int(learnt)), metrics
