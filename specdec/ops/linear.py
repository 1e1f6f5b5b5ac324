"""Linear layers of few rows on the CPU, with weights packed once into faster layouts in addition to the parameters.

A round multiplies 1 to 60 rows, a token or a tree, with every weight of the target. Its time is the time of reading
these weights. There are five ways, tried in this order (docs/log.md has their times).

- Our own product (`rows.cpp`) multiplies fp32 rows with a weight in bf16, in fp32, and reads half as many bytes. It
  serves fp32 weights that bf16 holds exactly, as those of a checkpoint in bf16, on processors with AVX2 or AVX-512,
  if a C++ compiler is available the first time. With AVX-512 four rows take the time of one, with AMX eight do, or
  nearly so. Under `torch.set_float32_matmul_precision("medium")` it rounds the rows to bf16 where the processor
  multiplies bf16, and eight rows take the time of one with AVX-512 too.
- FBGEMM does so with a weight in fp16, for weights that fp16 holds exactly after scaling by a power of two.
- oneDNN multiplies with a weight packed into its own layout, in fp32 and in bf16, with AVX-512.
- Our own product takes weights in fp32 too.
- A single row of fp32 is multiplied with blocks of the weight as a batch.

In all ways but the last, a row's result has the same bits whatever other rows are in the batch. Exceptions: in oneDNN a
single row differs, and in FBGEMM with AVX2 one row and two rows do. No other product of torch promises that.

A drafter need not be exact, so its weights may be rounded to int8, a scale for each of their rows. Our own product
then reads half as many bytes again (`int8.h`). Where it is not available FBGEMM multiplies with the large ones. It
rounds the rows to 8 bits of the range of all of them, so a row's result depends a little on the other rows.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from specdec.ops import native

ONEDNN_ROWS = 16  # oneDNN chooses its layout for so many rows; the layout serves any number
BLOCKS = 4  # of a weight that is multiplied with a single row
MAX_EXPONENT = 15  # scaled weights are below 2^15; fp16 ends at 65504
DTYPES = (torch.float32, torch.bfloat16)
UNIT = 64  # outputs that `rows.cpp` divides among threads together
SCALES = 2  # pairs of inputs that give way to the scales of a UNIT of outputs in int8

# Size from which FBGEMM gains by rounding: below it the call, or without VNNI the products, take most of the time.
LARGE = 2**20 if torch.cpu._is_vnni_supported() else 2**22

Product = Callable[[Tensor], Tensor]  # x [R,in] -> [R,out]


class RowsWeight(NamedTuple):
    """A weight of fp32 values, packed for `rows.cpp` in bf16 or fp32, or rounded to int8."""

    # [groups, in / n, outputs of a group, n], n 2 in bf16 and int8; the last UNIT is filled up with zeros. In int8 the
    # outputs' scales follow the inputs, as bytes: [groups, in / 2 + SCALES, UNIT, 2].
    packed: Tensor
    size: int  # outputs


class Fp16Weight(NamedTuple):
    """A weight of fp32 values, packed in fp16 for FBGEMM."""

    packed: torch.ScriptObject  # weight / scale
    scale: float  # a power of two


# Packed weights by storage, so that a head which target and drafter share is packed once. They are freed with it.
_packed: WeakIdKeyDictionary = WeakIdKeyDictionary()


def linear(weight: Tensor, bias: Tensor | None, int8: bool = False) -> Product:
    """Return the fastest function x [R,in] -> x weight.T + bias [R,out]. int8: of those that may round the weight."""
    packed = pack(weight, int8)
    if isinstance(packed, torch.ScriptObject):
        return _int8_linear(packed, bias, weight.dtype)
    if isinstance(packed, RowsWeight):
        own, (into, size) = native.operator("linear"), packed
        return (lambda x: own(x, into, size)) if bias is None else (lambda x: own(x, into, size).add_(bias))
    if isinstance(packed, Fp16Weight):
        return _fp16_linear(packed, bias)
    many = _plain_linear(weight, bias) if packed is None else _onednn_linear(packed, bias)
    if not _can_be_blocked(weight):
        return many
    single = _single_row_linear(weight, bias)
    return lambda x: single(x) if x.shape[0] == 1 else many(x)


def _plain_linear(weight: Tensor, bias: Tensor | None) -> Product:
    transposed = weight.t()
    return (lambda x: torch.mm(x, transposed)) if bias is None else (lambda x: torch.addmm(bias, x, transposed))


def _onednn_linear(packed: Tensor, bias: Tensor | None) -> Product:
    product = torch.ops.mkldnn._linear_pointwise.default._op  # the bare operator takes 1 us less than its wrapper
    return lambda x: product(x, packed, bias, "none", [], "")


def _fp16_linear(weight: Fp16Weight, bias: Tensor | None) -> Product:
    (packed, scale), product = weight, torch.ops.quantized.linear_dynamic_fp16.default._op
    if bias is not None:
        return lambda x: torch.add(bias, product(x, packed), alpha=scale)
    if scale == 1:
        return lambda x: product(x, packed)
    return lambda x: product(x, packed).mul_(scale)


def _int8_linear(packed: torch.ScriptObject, bias: Tensor | None, dtype: torch.dtype) -> Product:
    # Without VNNI sums of products of 8 bits overflow.
    product, fewer = torch.ops.quantized.linear_dynamic.default._op, not torch.cpu._is_vnni_supported()
    if dtype == torch.float32 and bias is None:
        return lambda x: product(x, packed, fewer)

    def multiply(x: Tensor) -> Tensor:
        y = product(x.float(), packed, fewer).to(dtype)
        return y if bias is None else y + bias

    return multiply


@native.seen_as("quantized.linear_dynamic_fp16.default", "quantized.linear_dynamic.default")
def _seen_fbgemm(x: Tensor, packed: torch.ScriptObject, fewer_bits: bool = False) -> Tensor:
    with _disable_current_modes():  # a handle is found, not made
        handle = torch.ops.specdec.hold_fbgemm(packed)
        size = torch.ops.specdec.fbgemm_linear(x, handle, fewer_bits, 0).shape[-1]
    return torch.ops.specdec.fbgemm_linear(x, handle, fewer_bits, size)


@native.seen_as("mkldnn._linear_pointwise.default")
def _seen_onednn(x: Tensor, packed: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    with _disable_current_modes():
        handle = torch.ops.specdec.hold_onednn(packed)
    return torch.ops.specdec.onednn_linear(x, handle, bias, packed.shape[0])


def _single_row_linear(weight: Tensor, bias: Tensor | None) -> Product:
    """Multiply x [1,in] in a batch, which runs on all threads. MKL has a faster kernel for it."""
    (rows, size), blocks = weight.shape, weight.unflatten(0, (BLOCKS, -1))

    def product(x: Tensor) -> Tensor:
        # Of the strides that describe x as a column, only those of `x.t()` are fast.
        y = torch.bmm(blocks, x.t().expand(BLOCKS, size, 1)).view(1, rows)
        return y if bias is None else y + bias

    return product


def _can_be_blocked(weight: Tensor) -> bool:
    on_cpu = weight.device.type == "cpu" and weight.dtype == torch.float32
    return on_cpu and weight.is_contiguous() and weight.shape[0] % BLOCKS == 0 and not torch.is_autocast_enabled("cpu")


def pack(weight: Tensor, int8: bool = False) -> Tensor | RowsWeight | Fp16Weight | torch.ScriptObject | None:
    """Return the weight [out,in] in our own layout, fp16 or oneDNN's, packed once for each version of its values.

    int8: rounded, where there is a product for that. None where packing has no use: on other devices, on processors
    without a fast product, and for weights that may still learn. Those change in ways that no version counter sees,
    such as through another parameter over the same memory.
    """
    if not _can_be_packed(weight):
        return None
    known, view = _packed.setdefault(weight.untyped_storage(), {}), (*_view_of(weight), int8)
    version, packed = known.get(view, (None, None))
    if version != weight._version:
        packed = (_pack_int8 if int8 else _pack)(weight.detach())
        known[view] = weight._version, packed
    return pack(weight) if int8 and packed is None else packed


def packed_rows(weight: Tensor, int8: bool) -> Tensor | None:
    """Return the weight in our own layout; None where `linear` takes another product. int8: as there."""
    packed = pack(weight, int8)
    return packed.packed if isinstance(packed, RowsWeight) else None


def inputs_of(packed: Tensor) -> int:
    """Return the number of inputs of a weight in our own layout."""
    return (packed.shape[1] - (SCALES if packed.dtype == torch.int8 else 0)) * packed.shape[3]


def bytes_read(weight: Tensor) -> int:
    """Return the bytes that a product with the weight reads, in the layout that it is packed in so far."""
    _, packed = _packed.get(weight.untyped_storage(), {}).get((*_view_of(weight), False), (None, None))
    if isinstance(packed, RowsWeight):
        return packed.packed.element_size() * weight.numel()
    return 2 * weight.numel() if isinstance(packed, Fp16Weight) else weight.nbytes


def _view_of(weight: Tensor) -> tuple:
    """Return the key of a view of a storage."""
    return weight.storage_offset(), weight.shape, weight.stride(), weight.dtype


def _can_be_packed(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and type(weight) in (Tensor, nn.Parameter)  # no shards, no stand-ins
        and weight.dtype in DTYPES
        and not weight.requires_grad
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not weight.is_inference()  # inference tensors have no version counter
    )


def has_int8(device: torch.device) -> bool:
    """Return whether there is a product with weights in int8."""
    fbgemm = torch.backends.quantized.engine in ("x86", "fbgemm") and hasattr(torch, "quantize_per_channel")
    return device.type == "cpu" and (native.has_rows() or fbgemm)


def _pack_bf16(weight: Tensor) -> RowsWeight | None:
    """Pack the weight in bf16; None unless bf16 holds all values exactly, and there is a product for them."""
    if weight.dtype != torch.float32 or weight.shape[1] % 2 or not native.has_rows():
        return None
    narrow = weight.bfloat16()
    return _pack_rows(narrow, 2) if torch.equal(narrow.float(), weight) else None


def _pack_fp32(weight: Tensor) -> RowsWeight | None:
    """Return the weight in our own layout in fp32; None where there is no product for it."""
    return _pack_rows(weight, 1) if weight.dtype == torch.float32 and native.has_rows() else None


def _pack_rows(weight: Tensor, lanes: int) -> RowsWeight:
    """Pack the weight in our own layout. lanes: inputs of an output that are adjacent."""
    size, inputs = weight.shape
    filled = F.pad(weight, (0, 0, 0, -size % UNIT))
    groups = filled.view(-1, torch.ops.specdec_rows.group(inputs, lanes), inputs // lanes, lanes)
    return RowsWeight(groups.transpose(1, 2).contiguous(), size)


def round_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight [out,in] in int8, and the scales [out] that its rows were divided by."""
    scales = weight.float().abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) / 127
    return (weight.float() / scales[:, None]).round().to(torch.int8), scales


def _pack_int8(weight: Tensor) -> RowsWeight | torch.ScriptObject | None:
    """Round the weight to int8 and pack it; None for small weights where our own product is not available."""
    (size, inputs), (rounded, scales) = weight.shape, round_int8(weight)
    if weight.dtype == torch.float32 and inputs % 2 == 0 and native.has_rows():
        groups = F.pad(rounded, (0, 0, 0, -size % UNIT)).view(-1, UNIT, inputs // 2, 2).transpose(1, 2)
        by = F.pad(scales, (0, -size % UNIT)).view(torch.int8).view(-1, SCALES, UNIT, 2)
        return RowsWeight(torch.cat([groups, by], 1), size)
    if weight.numel() < LARGE:
        return None
    zeros = torch.zeros(size, dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch 2.13 calls it deprecated, and has nothing else for FBGEMM
        quantised = torch.quantize_per_channel(weight.float(), scales.double(), zeros, 0, torch.qint8)
    return torch.ops.quantized.linear_prepack(quantised, None)


def _pack(weight: Tensor) -> Tensor | RowsWeight | Fp16Weight | None:
    ways = (_pack_bf16, _pack_fp16, _pack_onednn, _pack_fp32)
    return next((packed for way in ways if (packed := way(weight)) is not None), None)


def _pack_fp16(weight: Tensor) -> Fp16Weight | None:
    """Pack the weight in fp16; None unless fp16 holds all values exactly."""
    if weight.dtype != torch.float32 or torch.backends.quantized.engine not in ("x86", "fbgemm"):
        return None
    largest = weight.abs().max().item()
    if not math.isfinite(largest):
        return None
    for scale in (1.0, 2.0 ** (math.frexp(largest)[1] - MAX_EXPONENT)):
        scaled = weight / scale
        if torch.equal(scaled.half().float() * scale, weight):
            return Fp16Weight(torch.ops.quantized.linear_prepack_fp16(scaled.contiguous(), None), scale)
    return None


def _pack_onednn(weight: Tensor) -> Tensor | None:
    """Pack the weight in oneDNN's layout; None where oneDNN has no fast product for the dtype."""
    mkldnn = torch.backends.mkldnn
    fast = mkldnn.is_available() and mkldnn.enabled and torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    if not fast or (weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return None
    return torch.ops.mkldnn._reorder_linear_weight(weight, ONEDNN_ROWS)
