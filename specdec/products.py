"""Matrix products of few rows on the CPU: weights in oneDNN's own layout, beside the parameters they are copies of.

A round multiplies 2 to 60 rows, a tree, with every matrix of the target. torch's `mm` then costs 1.4 to 2.2 times what
oneDNN's product with a packed weight costs, in fp32 and in bf16 (docs/log.md). Moreover each row of that product is the
same to the last bit however many rows stand beside it, which no other product of torch promises.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

PACK_ROWS = 16  # for so many rows the layout is chosen; it serves any number
DTYPES = (torch.float32, torch.bfloat16)

# By storage, so that a head which target and drafter share is packed once; a pack goes when its weight goes.
_packs: WeakIdKeyDictionary = WeakIdKeyDictionary()


def linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """x [R,in] -> x weight.T + bias, [R,out], of the weight [out,in] as it is now, by the fastest product there is."""
    matrix = weight.t()
    direct = (lambda x: torch.mm(x, matrix)) if bias is None else (lambda x: torch.addmm(bias, x, matrix))
    packed = pack(weight)
    if packed is None:
        return direct
    product = torch.ops.mkldnn._linear_pointwise.default
    if weight.dtype == torch.bfloat16:
        return lambda x: product(x, packed, bias, "none", [], "")
    # A single row of fp32 is as fast without oneDNN, whose every call costs some 10 us more.
    return lambda x: direct(x) if x.shape[0] == 1 else product(x, packed, bias, "none", [], "")


def pack(weight: Tensor) -> Tensor | None:
    """The weight [out,in] in oneDNN's layout, made once for each state of the weight; None where that is no use: on
    other devices, where oneDNN has no fast product, and for weights that may still learn. Those change by ways that
    nothing counts, such as through another parameter over the same memory."""
    if not _packable(weight):
        return None
    known = _packs.setdefault(weight.untyped_storage(), {})
    at = weight.storage_offset(), weight.shape, weight.stride(), weight.dtype
    version, packed = known.get(at, (None, None))
    if version != weight._version:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACK_ROWS)
        known[at] = weight._version, packed
    return packed


def _packable(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and type(weight) in (Tensor, nn.Parameter)  # no shards, no stand-ins
        and weight.dtype in DTYPES
        and not weight.requires_grad
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not weight.is_inference()  # whose changes nothing counts
        and torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
        and torch.backends.cpu.get_cpu_capability().startswith("AVX512")
        and (weight.dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )
