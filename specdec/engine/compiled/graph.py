"""A recorded round as a graph of torch.fx: a function of the tensors that the round found.

The number of slots that attention may read, the bound, changes from round to round. So a round is recorded twice, with
two bounds. A number that differs between the records is a linear function of the bound, and the graph computes it.
The graph takes the bound from the length of its first input, and so one graph serves all bounds.
"""

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


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


def refuse_host_read() -> NoReturn:
    """Raise ValueError: what the host reads, and all that follows from it, would be the same in every later round."""
    raise ValueError("a compiled round cannot read values of tensors on the host: decode without compiling")


class _HostReads(TorchFunctionMode):
    """Refuses the reads that are no operators."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__):
            refuse_host_read()
        return func(*args, **(kwargs or {}))


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
        if op in (aten._local_scalar_dense.default, aten.equal.default):
            refuse_host_read()
        out = op(*args, **(kwargs or {}))
        self.calls.append(Call(op, args, kwargs or {}, out))
        return out


def record(run: Callable[[int], Any], bound: int, instead: Mapping[str, Callable] = MappingProxyType({})) -> Record:
    """Run a round, and record its operators. All but tensors is as the host knew it now: numbers, shapes, settings.

    instead: by the name of an operator, the function that is run and recorded in its place (`native.SEEN`).
    """
    noted = Record(bound)
    with _HostReads(), _Recorder(noted.calls, instead):
        noted.made = run(bound)
    return noted


@dataclass
class RoundGraph:
    """`module` takes `inputs`, those very tensors. It changes some of them, and returns what is new."""

    module: fx.GraphModule
    inputs: list[Tensor]  # the first is a stand-in whose length is the bound
    new: list[Tensor]  # what was made in the record and returned, one for each output
    made: Any  # all that the record returned


def make_graph(one: Record, other: Record | None = None) -> RoundGraph:
    """Return the graph of a round that was recorded with two bounds or, for one bound only, once.

    Raises ValueError if its operators depend on the bound in any other way.
    """
    other = other or one
    if one.operators() != other.operators():
        raise ValueError("a round cannot be compiled whose operators depend on the length of the texts")
    for call in one.calls:
        if call.kwargs.get("generator") is not None:  # what rounds draw they draw by `sampling.noise`
            raise ValueError(f"a round cannot be compiled that draws by {call.op}, which is another number each time")
    return GraphBuilder(one, other).build()


class GraphBuilder:
    """Puts one operator after the other into a graph."""

    def __init__(self, one: Record, other: Record):
        """Prepare a graph of two records of the same round, with different bounds."""
        self.one, self.other = one, other
        self.graph = fx.Graph()
        self.emit = self.graph.call_function
        self.nodes: dict[int, fx.Node] = {}  # by identity of the recorded tensor
        self.inputs: list[Tensor] = []
        self.written = {storage_of(x) for call in one.calls for x in call.written()}
        self.widths = row_widths(one.calls)
        self.bases: dict[int, tuple[fx.Node, Tensor]] = {}  # by storage: all of its memory, for those that are written

    def build(self) -> RoundGraph:
        """Return the graph. Raises ValueError if the records differ in more than the bound."""
        ruler = self._input(torch.empty(self.one.bound))
        found = list(found_tensors(self.one.calls))
        for x in found:
            self._place(x)
        for x in found:
            self.nodes.setdefault(id(x), self._view(x))
        self.bound = self.emit(aten.sym_size.int, (ruler, 0))
        for call, same in zip(self.one.calls, self.other.calls, strict=True):
            if not self._write_rows(call):
                self._copy(call, same)
        outside = {id(x) for x in found}
        new = [x for x in tensors_in(self.one.made) if id(x) in self.nodes and id(x) not in outside]
        # Copies: a result may be a view of what the round found.
        self.graph.output(tuple(self.emit(aten.clone.default, (self.nodes[id(x)],)) for x in new))
        return RoundGraph(fx.GraphModule(torch.nn.Module(), self.graph), self.inputs, new, self.one.made)

    # What the round finds

    def _input(self, x: Tensor) -> fx.Node:
        self.inputs.append(x)
        return self.graph.placeholder(f"input{len(self.inputs) - 1}")

    def _place(self, x: Tensor) -> None:
        """Make x an input, or its whole storage if that is written: written inputs may not overlap."""
        key = storage_of(x)
        if key not in self.written:
            self.nodes[id(x)] = self._input(x)
        elif key not in self.bases:
            whole = whole_storage(x, self.widths.get(key, 1))
            self.bases[key] = self._input(whole), whole

    def _view(self, x: Tensor) -> fx.Node:
        """Return x as a view of its storage, if that is an input."""
        if id(x) in self.nodes:
            return self.nodes[id(x)]
        node, whole = self.bases[storage_of(x)]
        if (x.shape, x.stride(), x.storage_offset()) == (whole.shape, whole.stride(), 0):
            return node
        return self.emit(aten.as_strided.default, (node, list(x.shape), list(x.stride()), x.storage_offset()))

    # What the round does

    def _copy(self, call: Call, same: Call) -> None:
        """Append the operator as it was called."""
        args = tuple(self._argument(v, w) for v, w in zip(call.args, same.args, strict=True))
        kwargs = {name: self._argument(v, same.kwargs[name]) for name, v in call.kwargs.items()}
        node = self.emit(call.op, args, kwargs)
        if isinstance(call.out, Tensor):
            self.nodes[id(call.out)] = node
        elif isinstance(call.out, (tuple, list)):
            for i, x in enumerate(call.out):
                if isinstance(x, Tensor):
                    self.nodes[id(x)] = self.emit(operator.getitem, (node, i))

    def _write_rows(self, call: Call) -> bool:
        """Put the rows that `index_copy_` writes, as `KVCache` does, into the memory itself.

        Views of the cache share memory, and for views Inductor copies the whole cache, there and back.
        """
        if call.op is not aten.index_copy_.default:
            return False
        x, dim, index, source = call.args
        memory, whole = self.bases.get(storage_of(x), (None, None))
        if memory is None or whole is None or whole.ndim == 1:
            return False
        emit, rows, count, width = self.emit, self.nodes[id(index)], x.shape[dim], whole.shape[1]
        blocks, first = math.prod(x.shape[:dim]), x.storage_offset() // width
        if blocks > 1:  # one for each place in the dimensions before `dim`
            starts = emit(aten.arange.start_step, (0, blocks * count, count), {"device": x.device})
            rows = emit(aten.add.Tensor, (emit(aten.unsqueeze.default, (starts, 1)), rows))
            rows = emit(aten.reshape.default, (rows, [-1]))
        rows = emit(aten.add.Tensor, (rows, first)) if first else rows
        values = emit(aten.reshape.default, (self.nodes[id(source)], [blocks * len(index), width]))
        emit(aten.index_put_.default, (memory, [rows], values))
        self.nodes[id(call.out)] = self.nodes[id(x)]
        return True

    def _argument(self, value: Any, same: Any) -> Any:
        """Return an argument, given its values in both records."""
        if isinstance(value, Tensor):
            return self.nodes[id(value)]
        if isinstance(value, (list, tuple)):
            return type(value)(self._argument(v, w) for v, w in zip(value, same, strict=True))
        return value if value == same else self._on_a_line(value, same)

    def _on_a_line(self, value: Any, same: Any) -> fx.Node:
        run = self.one.bound - self.other.bound
        if type(value) is not int or (value - same) % run:
            raise ValueError(f"a round cannot be compiled in which {same} becomes {value} for longer texts")
        slope = (value - same) // run
        node = self.bound if slope == 1 else self.emit(operator.mul, (self.bound, slope))
        rest = value - slope * self.one.bound
        return self.emit(operator.add, (node, rest)) if rest else node


def storage_of(x: Tensor) -> int:
    """Return a number that identifies the storage of a tensor."""
    return x.untyped_storage()._cdata


def whole_storage(x: Tensor, width: int) -> Tensor:
    """Return all memory of x's storage in x's dtype, [rows, width], or [elements] for a width of 1."""
    count = x.untyped_storage().nbytes() // x.element_size()
    shape = (count,) if width == 1 else (count // width, width)
    out: Any = torch.empty(0, dtype=x.dtype, device=x.device)
    return out.set_(x.untyped_storage(), 0, shape)


def row_widths(calls: list[Call]) -> dict[int, int]:
    """Return elements of a row by storage, for storages of which every `index_copy_` writes rows of one width."""
    widths: dict[int, set[int]] = {}
    for call in calls:
        if call.op is aten.index_copy_.default:
            x, dim = call.args[:2]
            width = math.prod(x.shape[dim + 1 :])
            fits = x.is_contiguous() and width and not x.storage_offset() % width
            fits = fits and not x.untyped_storage().nbytes() % (width * x.element_size())
            widths.setdefault(storage_of(x), set()).add(width if fits else 0)
    return {storage: width for storage, (width, *more) in widths.items() if width > 1 and not more}


def found_tensors(calls: list[Call]) -> Iterator[Tensor]:
    """Yield every tensor that calls take and that none of them made, once."""
    known: set[int] = set()
    for call in calls:
        for x in tensors_in((call.args, tuple(call.kwargs.values()))):
            if id(x) not in known:
                known.add(id(x))
                yield x
        known.update(id(x) for x in tensors_in(call.out))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested tuples, lists and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_in(part)
    elif is_dataclass(value):
        for f in fields(value):
            yield from tensors_in(vars(value).get(f.name))


def filler(value: Any, places: dict[int, int]) -> Callable[[list[Tensor]], Any]:
    """Return a function of tensors that copies nested dataclasses with new tensors in them.

    It replaces the tensor whose identity `places` maps to i by tensor i. Parts without such tensors are not copied.
    Rounds call the function, so places are found in advance.
    """
    if isinstance(value, Tensor) and id(value) in places:
        return operator.itemgetter(places[id(value)])
    held = {f.name: vars(value)[f.name] for f in fields(value)} if is_dataclass(value) else {}
    changing = {name: part for name, part in held.items() if any(id(x) in places for x in tensors_in(part))}
    if not changing:
        return lambda tensors: value
    parts = [(name, filler(part, places)) for name, part in changing.items()]

    def fill(tensors: list[Tensor]) -> Any:
        made = object.__new__(type(value))
        vars(made).update(vars(value))
        vars(made).update((name, part(tensors)) for name, part in parts)
        return made

    return fill
