"""Matrix products of few rows on the CPU: weights in layouts made for them, beside the parameters they are copies of.

A round multiplies 1 to 60 rows, a token or a tree, with every matrix of the target, and takes as long as it takes to
read them. In the order of preference, with shares of the time of torch's `mm` over the demo's matrices (docs/log.md):

- fp32 weights that fp16 holds exactly once they are scaled by a power of two, as it does those of a checkpoint in bf16
  or fp16: FBGEMM multiplies fp32 rows with them, in fp32, and reads half as many bytes. 0.2 to 0.4.
- oneDNN's product with a weight packed into its own layout, in fp32 and in bf16. 0.3 to 0.6.
- a single row of fp32 as a batch of blocks of the weight. 0.4.

With the first two each row of the product is the same to the last bit however many rows stand beside it, which no other
product of torch promises.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

PACK_ROWS = 16  # for so many rows oneDNN's layout is chosen; it serves any number
BLOCKS = 4  # of a weight, where a single row is multiplied with each
LARGEST = 15  # scaled weights lie below 2^15; fp16 ends at 65504
DTYPES = (torch.float32, torch.bfloat16)


class Half(NamedTuple):
    """A weight of fp32 values in fp16."""

    packed: torch.ScriptObject  # of weight / scale
    scale: float  # a power of two


# By storage, so that a head which target and drafter share is packed once; a pack goes when its weight goes.
_packs: WeakIdKeyDictionary = WeakIdKeyDictionary()


def linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """x [R,in] -> x weight.T + bias, [R,out], of the weight [out,in] as it is now, by the fastest product there is."""
    packed = pack(weight)
    if isinstance(packed, Half):
        return _half_product(packed, bias)
    many = _direct_product(weight, bias) if packed is None else _packed_product(packed, bias)
    if not _blocked(weight):
        return many
    single = _single_row(weight, bias)
    return lambda x: single(x) if x.shape[0] == 1 else many(x)


def _direct_product(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    matrix = weight.t()
    return (lambda x: torch.mm(x, matrix)) if bias is None else (lambda x: torch.addmm(bias, x, matrix))


def _packed_product(packed: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    product = torch.ops.mkldnn._linear_pointwise.default._op  # 1 us less than with what is wrapped around it
    return lambda x: product(x, packed, bias, "none", [], "")


def _half_product(half: Half, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    (packed, scale), product = half, torch.ops.quantized.linear_dynamic_fp16.default._op
    if bias is not None:
        return lambda x: torch.add(bias, product(x, packed), alpha=scale)
    if scale == 1:
        return lambda x: product(x, packed)
    return lambda x: product(x, packed).mul_(scale)


def _single_row(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """x [1,in] -> [1,out]: a batch runs on all threads, and MKL has a better kernel for it than for one product."""
    (rows, size), blocks = weight.shape, weight.unflatten(0, (BLOCKS, -1))

    def product(x: Tensor) -> Tensor:
        # x as a column of length `size` between columns: of the strides that name it only these are fast.
        y = torch.bmm(blocks, x.t().expand(BLOCKS, size, 1)).view(1, rows)
        return y if bias is None else y + bias

    return product


def _blocked(weight: Tensor) -> bool:
    on_cpu = weight.device.type == "cpu" and weight.dtype == torch.float32
    return on_cpu and weight.is_contiguous() and weight.shape[0] % BLOCKS == 0 and not torch.is_autocast_enabled("cpu")


def pack(weight: Tensor) -> Tensor | Half | None:
    """The weight [out,in] in fp16 or in oneDNN's layout, made once for each state of the weight; None where that is no
    use: on other devices, where there is no fast product, and for weights that may still learn. Those change by ways
    that nothing counts, such as through another parameter over the same memory."""
    if not _packable(weight):
        return None
    known, at = _packs.setdefault(weight.untyped_storage(), {}), _place(weight)
    version, packed = known.get(at, (None, None))
    if version != weight._version:
        packed = _halved(weight.detach()) or _reordered(weight.detach())
        known[at] = weight._version, packed
    return packed


def bytes_read(weight: Tensor) -> int:
    """Bytes that a product with the weight reads, as it is packed by now."""
    _, packed = _packs.get(weight.untyped_storage(), {}).get(_place(weight), (None, None))
    return 2 * weight.numel() if isinstance(packed, Half) else weight.nbytes


def _place(weight: Tensor) -> tuple:
    return weight.storage_offset(), weight.shape, weight.stride(), weight.dtype


def _packable(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and type(weight) in (Tensor, nn.Parameter)  # no shards, no stand-ins
        and weight.dtype in DTYPES
        and not weight.requires_grad
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not weight.is_inference()  # whose changes nothing counts
    )


def _halved(weight: Tensor) -> Half | None:
    if weight.dtype != torch.float32 or torch.backends.quantized.engine not in ("x86", "fbgemm"):
        return None
    most = weight.abs().max().item()
    if not math.isfinite(most):
        return None
    for scale in (1.0, 2.0 ** (math.frexp(most)[1] - LARGEST)):
        scaled = weight / scale
        if torch.equal(scaled.half().float() * scale, weight):
            return Half(torch.ops.quantized.linear_prepack_fp16(scaled.contiguous(), None), scale)
    return None


def _reordered(weight: Tensor) -> Tensor | None:
    mkldnn = torch.backends.mkldnn
    fast = mkldnn.is_available() and mkldnn.enabled and torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    if not fast or (weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return None
    return torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS)
