"""Operators that Inductor compiles badly as they stand, and what computes the same.

- **Rows written by `index_copy_`**, or by our own operators in its place, as `KVCache` writes keys and values. Its
  views of the cache share memory, and for views Inductor copies the whole cache, there and back. Written into the
  memory itself, as one tensor of rows, nothing is copied but the rows.
- **Products with packed weights** (`cpu_linear`), whose weights are no tensors that Inductor knows: `native`.
- **Norms, rotations and moves of our own** (`rows.cpp`), which launched rounds call instead of several operators, and
  calls that hold several of ours. Inductor makes of those several a part of the loops around them. Products and
  attention stay calls.
- **The largest of many and its place**, `max` over the vocabulary. Inductor's loop carries the place along and is ten
  times slower than one over the values, and another that looks for the first that equals the largest.
"""

import itertools
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdec.engine.compiled.record import Call
from specdec.ops.rows_weight import inputs_of

if TYPE_CHECKING:
    from torch.fx import Node

    from specdec.engine.compiled.graph import GraphBuilder

aten = torch.ops.aten
# By name, as not every build of torch has both.
FP16_LINEAR, INT8_LINEAR = "quantized.linear_dynamic_fp16.default", "quantized.linear_dynamic.default"
ONEDNN_LINEAR = "mkldnn._linear_pointwise.default"
MANY = 512  # elements among which the largest is looked for in two loops


def rewritten(builder: "GraphBuilder", call: Call) -> bool:
    """Put something else in the place of the call, if there is something for it."""
    if call.op is aten.index_copy_.default:
        return _write_rows(builder, call)
    if str(call.op) in (FP16_LINEAR, INT8_LINEAR, ONEDNN_LINEAR):
        return _multiply(builder, call)
    if str(call.op) in OWN:
        return OWN[str(call.op)](builder, call)
    if call.op is aten.max.dim and call.args[0].device.type == "cpu":
        return _largest(builder, call)
    return False


def row_widths(calls: list[Call]) -> dict[int, int]:
    """Storage -> elements of a row, for storages of which every call writes rows of one width."""
    widths: dict[int, set[int]] = {}
    for call in calls:
        for x, width in _rows_written(call):
            fits = x.is_contiguous() and width and not x.storage_offset() % width
            fits = fits and not x.untyped_storage().nbytes() % (width * x.element_size())
            widths.setdefault(x.untyped_storage()._cdata, set()).add(width if fits else 0)
    return {storage: width for storage, (width, *more) in widths.items() if width > 1 and not more}


def _rows_written(call: Call) -> list[tuple[Tensor, int]]:
    """The tensors whose rows are written, and the elements of such a row."""
    if call.op is aten.index_copy_.default:
        x, dim = call.args[:2]
        return [(x, math.prod(x.shape[dim + 1 :]))]
    if str(call.op) in (ROPE_WRITE, ATTEND_ADD):
        return [(x, x.shape[1]) for x in call.written()]
    if str(call.op) == COMMIT:
        return [(x, math.prod(x.shape[3:])) for x in call.written()]
    return []


def _write_rows(builder: "GraphBuilder", call: Call) -> bool:
    x, dim, index, source = call.args
    base = builder.base(x)
    if base is None or base[1].ndim == 1:
        return False
    rows, count = builder.nodes[id(index)], x.shape[dim]
    blocks = math.prod(x.shape[:dim])
    if blocks > 1:  # one for each place in the dimensions before `dim`
        starts = builder.emit(aten.arange.start_step, (0, blocks * count, count), {"device": x.device})
        rows = builder.emit(aten.add.Tensor, (builder.emit(aten.unsqueeze.default, (starts, 1)), rows))
        rows = builder.emit(aten.reshape.default, (rows, [-1]))
    _store(builder, x, rows, blocks * len(index), builder.nodes[id(source)])
    builder.put(call.out, builder.nodes[id(x)])
    return True


def _store(builder: "GraphBuilder", x: Tensor, rows: "Node", count: int, values: "Node") -> None:
    """Write `count` values to these rows of x, counted from its first, in the memory that it lies in."""
    memory, whole = builder.base(x)
    width = whole.shape[1]
    first = x.storage_offset() // width
    rows = builder.emit(aten.add.Tensor, (rows, first)) if first else rows
    values = builder.emit(aten.reshape.default, (values, [count, width]))
    builder.emit(aten.index_put_.default, (memory, [rows], values))


def _multiply(builder: "GraphBuilder", call: Call) -> bool:
    x, packed, size = builder.nodes[id(call.args[0])], builder.nodes[id(call.args[1])], call.out.shape[-1]
    if str(call.op) in (FP16_LINEAR, INT8_LINEAR):
        fewer_bits = bool(call.args[2:] and call.args[2])
        node = builder.emit(torch.ops.specdec.fbgemm_linear.default, (x, packed, fewer_bits, size))
    else:
        bias = call.args[2] if call.args[2] is None else builder.nodes[id(call.args[2])]
        node = builder.emit(torch.ops.specdec.onednn_linear.default, (x, packed, bias, size))
    builder.put(call.out, node)
    return True


def _largest(builder: "GraphBuilder", call: Call) -> bool:
    """The first of equals, as `max` gives it on the CPU; of numbers that are none, the last place."""
    x, dim, keepdim = (*call.args, False)[:3]
    size = x.shape[dim]
    if size < MANY or dim not in (-1, x.ndim - 1) or not x.dtype.is_floating_point:
        return False
    node, emit = builder.nodes[id(x)], builder.emit
    value = emit(aten.amax.default, (node, [-1], True))
    places = emit(aten.arange.default, (size,), {"dtype": torch.int32, "device": x.device})
    found = emit(aten.where.ScalarOther, (emit(aten.eq.Tensor, (node, value)), places, size - 1))
    place = emit(aten._to_copy.default, (emit(aten.amin.default, (found, [-1], True)),), {"dtype": torch.int64})
    for out, result in zip(call.out, (value, place), strict=True):
        builder.put(out, result if keepdim else emit(aten.squeeze.dim, (result, -1)))
    return True


def _norm(builder: "GraphBuilder", call: Call) -> bool:
    x, weight, eps = call.args
    builder.put(call.out, _normed(builder, builder.nodes[id(x)], builder.nodes[id(weight)], x.shape[-1], eps))
    return True


def _add_norm(builder: "GraphBuilder", call: Call) -> bool:
    x, y, weight, eps = call.args
    return _put_sum(builder, call, x, builder.nodes[id(y)], weight, eps)


def _normed(builder: "GraphBuilder", x: "Node", weight: "Node", size: int, eps: float) -> "Node":
    emit = builder.emit
    length = emit(aten.linalg_vector_norm.default, (x, 2, [-1], True))
    mean = emit(aten.mul.Tensor, (emit(aten.mul.Tensor, (length, length)), 1 / size))
    scale = emit(aten.rsqrt.default, (emit(aten.add.Tensor, (mean, eps)),))
    return emit(aten.mul.Tensor, (emit(aten.mul.Tensor, (x, scale)), weight))


def _rotate(builder: "GraphBuilder", call: Call) -> bool:
    builder.put(call.out, _turned(builder, *(builder.nodes[id(arg)] for arg in call.args), call.args[0].shape[-1]))
    return True


def _turned(builder: "GraphBuilder", x: "Node", cos: "Node", sin: "Node", dim: int) -> "Node":
    exchanged = builder.emit(aten.roll.default, (x, [dim // 2], [-1]))
    return builder.emit(aten.addcmul.default, (builder.emit(aten.mul.Tensor, (x, cos)), exchanged, sin))


def _norm_pair(builder: "GraphBuilder", call: Call) -> bool:
    nodes, sizes = [builder.nodes[id(arg)] for arg in call.args[:4]], [arg.shape[-1] for arg in call.args[:2]]
    normed = [_normed(builder, *each) for each in zip(nodes[:2], nodes[2:], sizes, call.args[4:], strict=True)]
    builder.put(call.out, builder.emit(aten.cat.default, (normed, -1)))
    return True


def _rope_write(builder: "GraphBuilder", call: Call) -> bool:
    rows, *rest = call.args
    builder.put(call.out, _written(builder, builder.nodes[id(rows)], rows.shape[1], *rest))
    return True


def _written(
    builder: "GraphBuilder", rows: "Node", heads: int, cos: Tensor, sin: Tensor, slots: Tensor, keys: Tensor,
    values: Tensor, gains: Tensor | None, eps: float,
) -> "Node":  # fmt: skip
    """What `rope_write` does with rows of so many heads, q, k and v -> q."""
    nodes, emit = builder.nodes, builder.emit
    (b, n, _, dim), width = cos.shape, keys.shape[1]
    parts = emit(aten.reshape.default, (rows, [b, n, heads, dim]))
    ends = 0, heads - 2 * (width // dim), heads - width // dim, heads
    q, k, v = (emit(aten.slice.Tensor, (parts, 2, first, last)) for first, last in itertools.pairwise(ends))
    if gains is not None:
        both = [emit(aten.select.int, (nodes[id(gains)], 0, side)) for side in (0, 1)]
        q, k = (_normed(builder, x, gain, dim, eps) for x, gain in zip((q, k), both, strict=True))
    q, k = (_turned(builder, x, nodes[id(cos)], nodes[id(sin)], dim) for x in (q, k))
    _store(builder, keys, nodes[id(slots)], b * n, k)
    _store(builder, values, nodes[id(slots)], b * n, v)
    return q


def _attend_add(builder: "GraphBuilder", call: Call) -> bool:
    residual, x, qkv, o, cos, sin, slots, *flat = call.args[:9]
    keys, values, lens, ancestors, nodes, scale, gains, gain_eps, weight, eps = call.args[9:]
    emit, node, ops = builder.emit, builder.nodes, torch.ops.specdec_rows
    rows, dim, width = len(x), keys.shape[3], inputs_of(o)
    heads = width // dim + 2 * keys.shape[1]
    made = emit(ops.linear.default, (node[id(x)], node[id(qkv)], heads * dim))
    q = _written(builder, made, heads, cos, sin, slots, *flat, gains, gain_eps)
    tree = ancestors if ancestors is None else node[id(ancestors)]
    what = q, node[id(keys)], node[id(values)], node[id(lens)], tree, nodes, scale
    seen = emit(aten.reshape.default, (emit(ops.tree_attention.default, what), [rows, width]))
    made = emit(ops.linear.default, (seen, node[id(o)], residual.shape[1]))
    return _put_sum(builder, call, residual, made, weight, eps)


def _mlp_add(builder: "GraphBuilder", call: Call) -> bool:
    residual, x, gate_up, down, weight, eps = call.args
    what = *(builder.nodes[id(arg)] for arg in (x, gate_up, down)), residual.shape[1]
    made = builder.emit(torch.ops.specdec_rows.mlp.default, what)
    return _put_sum(builder, call, residual, made, weight, eps)


def _put_sum(builder: "GraphBuilder", call: Call, x: Tensor, y: "Node", weight: Tensor, eps: float) -> bool:
    """x + y and its norm are what the call gives."""
    total = builder.emit(aten.add.Tensor, (builder.nodes[id(x)], y))
    builder.put(call.out[0], total)
    builder.put(call.out[1], _normed(builder, total, builder.nodes[id(weight)], x.shape[-1], eps))
    return True


def _commit(builder: "GraphBuilder", call: Call) -> bool:
    """All rows of a path are moved, those behind its end too, where nobody looks."""
    (layers, lens, path, _), nodes, emit = call.args, builder.nodes, builder.emit
    _, rows, slots = layers[0].shape[:3]
    (batch, depth), device = path.shape, {"device": path.device}
    starts = emit(aten.arange.start_step, (0, batch * slots, slots), device)
    first = emit(aten.unsqueeze.default, (emit(aten.add.Tensor, (nodes[id(lens)], starts)), 1))
    steps = emit(aten.slice.Tensor, (nodes[id(path)], 1, 1, depth)), emit(aten.arange.start, (1, depth), device)
    of_keys = (emit(aten.reshape.default, (emit(aten.add.Tensor, (first, step)), [-1])) for step in steps)
    source, place = (emit(aten.cat.default, ([x, emit(aten.add.Tensor, (x, rows * slots))],)) for x in of_keys)
    for layer in layers if depth > 1 else ():
        moved = emit(aten.index_select.default, (builder.base(layer)[0], 0, source))
        _store(builder, layer, place, 2 * batch * (depth - 1), moved)
    return True


ROPE_WRITE, ATTEND_ADD, COMMIT = (f"specdec_rows.{name}.default" for name in ("rope_write", "attend_add", "commit"))
# By name, as they are there only where they could be compiled.
OWN = {
    "specdec_rows.rms_norm.default": _norm,
    "specdec_rows.add_norm.default": _add_norm,
    "specdec_rows.norm_pair.default": _norm_pair,
    "specdec_rows.rotate.default": _rotate,
    ROPE_WRITE: _rope_write,
    ATTEND_ADD: _attend_add,
    "specdec_rows.mlp_add.default": _mlp_add,
    COMMIT: _commit,
}
