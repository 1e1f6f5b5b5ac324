"""What a function does to tensors: every operator that torch runs for it, in order."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass
class Call:
    """One operator that ran."""

    op: torch._ops.OpOverload
    args: tuple
    kwargs: dict
    out: Any

    def written(self) -> list[Tensor]:
        """Return the arguments that the operator writes to."""
        given = dict(zip((a.name for a in self.op._schema.arguments), self.args, strict=False)) | self.kwargs
        writes = [a.name for a in self.op._schema.arguments if a.alias_info and a.alias_info.is_write]
        values = [given[name] for name in writes if name in given]
        return [x for value in values for x in (value if isinstance(value, list) else [value]) if isinstance(x, Tensor)]


@dataclass
class Record:
    """The operators of a run and its result. It holds all tensors, so that no two of them share an address."""

    bound: int
    calls: list[Call] = field(default_factory=list)
    made: Any = None

    def operators(self) -> list[torch._ops.OpOverload]:
        """Return the operators of all calls, in order."""
        return [call.op for call in self.calls]


class _Recorder(TorchDispatchMode):
    def __init__(self, calls: list[Call], instead: Mapping[str, Callable]):
        super().__init__()
        self.calls, self.instead = calls, instead

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if function := self.instead.get(str(op)):
            with self:
                out = function(*args, **(kwargs or {}))
            if out is not NotImplemented:
                return out
        out = op(*args, **(kwargs or {}))
        self.calls.append(Call(op, args, kwargs or {}, out))
        return out


def record(run: Callable[[int], Any], bound: int, instead: Mapping[str, Callable] = MappingProxyType({})) -> Record:
    """Run a round, and record its operators. All but tensors is as the host knew it now: numbers, shapes, settings.

    instead: by the name of an operator, the function that is run and recorded in its place (`native.SEEN`).
    """
    noted = Record(bound)
    with _Recorder(noted.calls, instead):
        noted.made = run(bound)
    return noted
