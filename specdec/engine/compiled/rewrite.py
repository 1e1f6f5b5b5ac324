"""Operators that Inductor compiles badly as they stand, and what computes the same.

- **Rows written by `index_copy_`**, as `KVCache` writes keys and values. Its views of the cache share memory, and for
  views Inductor copies the whole cache, there and back. Written into the memory itself, as one tensor of rows, nothing
  is copied but the rows.
- **Products with packed weights** (`cpu_linear`), whose weights are no tensors that Inductor knows: `native`.
- **Norms and rotations of our own** (`norm_rope.h`), which launched rounds call instead of several operators. Inductor
  makes of those several a part of the loops around them.
- **The largest of many and its place**, `max` over the vocabulary. Inductor's loop carries the place along and is ten
  times slower than one over the values, and another that looks for the first that equals the largest.
"""

import math
from typing import TYPE_CHECKING

import torch

from specdec.engine.compiled.record import Call

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
    """Storage -> elements of a row, for storages of which every `index_copy_` writes rows of one width."""
    widths: dict[int, set[int]] = {}
    for call in calls:
        if call.op is aten.index_copy_.default:
            x, dim = call.args[:2]
            width = math.prod(x.shape[dim + 1 :])
            fits = x.is_contiguous() and width and not x.storage_offset() % width
            fits = fits and not x.untyped_storage().nbytes() % (width * x.element_size())
            widths.setdefault(x.untyped_storage()._cdata, set()).add(width if fits else 0)
    return {storage: width for storage, (width, *more) in widths.items() if width > 1 and not more}


def _write_rows(builder: "GraphBuilder", call: Call) -> bool:
    x, dim, index, source = call.args
    base = builder.base(x)
    if base is None or base[1].ndim == 1:
        return False
    memory, whole = base
    width, count = whole.shape[1], x.shape[dim]
    rows, first = builder.nodes[id(index)], x.storage_offset() // width
    blocks = math.prod(x.shape[:dim])
    if blocks > 1:  # one for each place in the dimensions before `dim`
        starts = (first, first + blocks * count, count)
        starts = builder.emit(aten.arange.start_step, starts, {"device": x.device})
        rows = builder.emit(aten.add.Tensor, (builder.emit(aten.unsqueeze.default, (starts, 1)), rows))
        rows = builder.emit(aten.reshape.default, (rows, [-1]))
    elif first:
        rows = builder.emit(aten.add.Tensor, (rows, first))
    values = builder.emit(aten.reshape.default, (builder.nodes[id(source)], [blocks * len(index), width]))
    builder.emit(aten.index_put_.default, (memory, [rows], values))
    builder.put(call.out, builder.nodes[id(x)])
    return True


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
    x, weight = (builder.nodes[id(arg)] for arg in call.args[:2])
    builder.put(call.out, _normed(builder, x, weight, *_size_and_eps(call)))
    return True


def _add_norm(builder: "GraphBuilder", call: Call) -> bool:
    x, y, weight = (builder.nodes[id(arg)] for arg in call.args[:3])
    total = builder.emit(aten.add.Tensor, (x, y))
    builder.put(call.out[0], total)
    builder.put(call.out[1], _normed(builder, total, weight, *_size_and_eps(call)))
    return True


def _size_and_eps(call: Call) -> tuple[int, float]:
    return call.args[0].shape[-1], call.args[-1]


def _normed(builder: "GraphBuilder", x: "Node", weight: "Node", size: int, eps: float) -> "Node":
    emit = builder.emit
    length = emit(aten.linalg_vector_norm.default, (x, 2, [-1], True))
    mean = emit(aten.mul.Tensor, (emit(aten.mul.Tensor, (length, length)), 1 / size))
    scale = emit(aten.rsqrt.default, (emit(aten.add.Tensor, (mean, eps)),))
    return emit(aten.mul.Tensor, (emit(aten.mul.Tensor, (x, scale)), weight))


def _rotate(builder: "GraphBuilder", call: Call) -> bool:
    x, cos, sin = (builder.nodes[id(arg)] for arg in call.args)
    exchanged = builder.emit(aten.roll.default, (x, [call.args[0].shape[-1] // 2], [-1]))
    turned = builder.emit(aten.addcmul.default, (builder.emit(aten.mul.Tensor, (x, cos)), exchanged, sin))
    builder.put(call.out, turned)
    return True


# By name, as they are there only where they could be compiled.
OWN = {
    "specdec_rows.rms_norm.default": _norm,
    "specdec_rows.add_norm.default": _add_norm,
    "specdec_rows.rotate.default": _rotate,
}
