"""One process or many: who they are (accelerate), how they share gradients (DDP, FSDP), and full tensors from shards.

Start several with `torchrun --nproc-per-node=N -m training.train ...`, or, on GPUs, `accelerate launch -m ...`.
"""

import copy
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Processes:
    """This process among all: its number, how many there are, and its device."""

    rank: int = 0
    world: int = 1
    device: str = "cpu"

    @property
    def main(self) -> bool:
        return self.rank == 0


def join_processes(device: str) -> Processes:
    """Meet the processes that a launcher started, over gloo on the CPU and nccl on GPUs, one GPU each; alone without
    a launcher."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return Processes(device=device)
    from accelerate import PartialState

    state = PartialState(cpu=device == "cpu")
    return Processes(state.process_index, state.num_processes, str(state.device) if device != "cpu" else device)


def wrap(module: nn.Module, processes: Processes, fsdp: bool) -> nn.Module:
    """The module as all processes train it; its parameters stay where they are, as shards (DTensor) if fsdp."""
    if processes.world == 1:
        return module
    if fsdp:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        kind = torch.device(processes.device).type
        return fully_shard(module, mesh=init_device_mesh(kind, (processes.world,)))
    # Buffers are the target's, the same everywhere: sending them along would cost more than the gradients.
    buffers = [name for name, _ in module.named_buffers()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, buffers)
    # A drafter of more heads than the objective has steps leaves some unused.
    return DistributedDataParallel(module, find_unused_parameters=True)


def accumulating(module: nn.Module, last: bool) -> AbstractContextManager:
    """Around forward and backward of one of several batches of a step: gradients are shared with the last one only."""
    if isinstance(module, DistributedDataParallel):
        return nullcontext() if last else module.no_sync()
    if hasattr(module, "set_requires_gradient_sync"):
        module.set_requires_gradient_sync(last)
    return nullcontext()


@dataclass
class Sums:
    """Values of several batches, each times the batch's number of counted positions, to become means over positions."""

    total: Tensor | None = None  # fp64: weight, loss, stop, padded and learnt tokens, then the metrics, flat
    shapes: dict[str, torch.Size] = field(default_factory=dict)

    def add(self, weight: Tensor, loss: Tensor, mask: Tensor, stop: bool, metrics: dict[str, Tensor]) -> None:
        self.shapes = {name: value.shape for name, value in metrics.items()}
        counts = weight.new_tensor([stop, mask.numel(), mask.count_nonzero()])
        head = torch.cat([torch.stack([weight, loss.detach() * weight]), counts])
        flat = torch.cat([head, *(value.detach().flatten() * weight for value in metrics.values())]).double()
        self.total = flat if self.total is None else self.total + flat

    def means(self, processes: Processes) -> tuple[float, float, bool, tuple[int, int], dict[str, Tensor]]:
        """Over all processes: counted positions, mean loss, whether anyone was asked to stop, padded and learnt tokens,
        mean metrics."""
        if processes.world > 1:
            dist.all_reduce(self.total)
        total = self.total.cpu()
        weight, loss, stop, tokens, learnt = total[:5].tolist()
        parts = (total[5:] / max(weight, 1)).split([shape.numel() for shape in self.shapes.values()])
        metrics = {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}
        return weight, loss / max(weight, 1), stop > 0, (int(tokens), int(learnt)), metrics


def full(value):
    """Shards -> full tensors, through dicts and lists; every process must call it."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, dict):
        return {key: full(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [full(item) for item in value]
    return value


def shell(drafter: nn.Module) -> nn.Module:
    """A second drafter of the same kind, with parameters of its own; what belongs to the target is shared."""
    return copy.deepcopy(drafter, {id(buffer): buffer for buffer in drafter.buffers()})


def fill(shell: nn.Module, weights: dict[str, Tensor], here: bool = True) -> None:
    """Let a shell have these weights, whole, and where nothing need be gathered or cast the very same memory; only if
    `here`, but every process must call it."""
    own = dict(shell.named_parameters())
    for name, weight in weights.items():
        value = full(weight.detach())
        if here:
            own[name].data = value.to(own[name].dtype)


def gather(own: list, processes: Processes) -> list:
    """The items of all processes' lists, those of process 0 first; every process must call it."""
    if processes.world == 1:
        return own
    lists: list[list | None] = [None] * processes.world
    dist.all_gather_object(lists, own)
    return [item for items in lists for item in items]


def sharded_as(value: Tensor, like: Tensor) -> Tensor:
    """A full tensor as the shards that `like` has, if it has any."""
    if not isinstance(like, DTensor):
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
