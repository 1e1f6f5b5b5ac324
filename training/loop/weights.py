"""Weights in several forms: full tensors of shards and shards of full tensors, and a second drafter that holds them."""

import copy
import sys
from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

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
    if isinstance(value, list | tuple):
        return [full(item) for item in value]
    return value


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


def sharded_as(value: Tensor, like: Any) -> Tensor:
    """A full tensor, cut into shards as `like` is, if that is cut."""
    if not is_shard(like):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
