"""Weights in the layout of our own products (`rows.cpp`)."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.ops import native

UNIT = 64  # outputs that `rows.cpp` divides among threads together
SCALES = 2  # pairs of inputs that give way to the scales of a UNIT of outputs in int8


class RowsWeight(NamedTuple):
    """A weight of fp32 values, packed for `rows.cpp` in bf16 or fp32, or rounded to int8."""

    # [groups, in / n, outputs of a group, n], n 2 in bf16 and int8; the last UNIT is filled up with zeros. In int8 the
    # outputs' scales lie behind the inputs, as bytes: [groups, in / 2 + SCALES, UNIT, 2].
    packed: Tensor
    size: int  # outputs


def inputs_of(packed: Tensor) -> int:
    """Of a weight in our own layout."""
    return (packed.shape[1] - (SCALES if packed.dtype == torch.int8 else 0)) * packed.shape[3]


def pack_bf16(weight: Tensor) -> RowsWeight | None:
    """None unless bf16 holds all values exactly, and there is a product for them."""
    if weight.dtype != torch.float32 or weight.shape[1] % 2 or not native.has_rows():
        return None
    narrow = weight.bfloat16()
    return _pack_rows(narrow, 2) if torch.equal(narrow.float(), weight) else None


def pack_fp32(weight: Tensor) -> RowsWeight | None:
    return _pack_rows(weight, 1) if weight.dtype == torch.float32 and native.has_rows() else None


def _pack_rows(weight: Tensor, beside: int) -> RowsWeight:
    """beside: how many inputs of an output lie side by side."""
    size, inputs = weight.shape
    filled = F.pad(weight, (0, 0, 0, -size % UNIT))
    groups = filled.view(-1, torch.ops.specdec_rows.group(inputs, beside), inputs // beside, beside)
    return RowsWeight(groups.transpose(1, 2).contiguous(), size)


def row_scales(weight: Tensor) -> Tensor:
    """[out] what a weight [out,in] is divided by, row by row, before it is rounded to int8."""
    return weight.float().abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) / 127


def pack_int8(weight: Tensor) -> RowsWeight | None:
    """Rounded. None where there is no product for it."""
    size, inputs = weight.shape
    if weight.dtype != torch.float32 or inputs % 2 or not native.has_rows():
        return None
    scales = row_scales(weight)
    rounded = (weight / scales[:, None]).round().to(torch.int8)
    groups = F.pad(rounded, (0, 0, 0, -size % UNIT)).view(-1, UNIT, inputs // 2, 2).transpose(1, 2)
    by = F.pad(scales, (0, -size % UNIT)).view(torch.int8).view(-1, SCALES, UNIT, 2)
    return RowsWeight(torch.cat([groups, by], 1), size)
