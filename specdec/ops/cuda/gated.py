"""The gated activation between the two products of an MLP.

    y = act(gate) * up       SwiGLU: act(x) = x sigmoid(x)
                             GeGLU:  act(x) = x sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3)), which is gelu with tanh

In torch: the middle of `ops.gated.gated_mlp`, which rounds act(gate) to the dtype before it multiplies. Here only y is
rounded.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ACTIVATIONS = ("silu", "gelu_tanh")  # as in `ops.gated.ACTIVATIONS`


@triton.jit
def _gated(gate_up, y, width, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    gate = tl.load(gate_up + row * 2 * width + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + columns, mask=mask, other=0.0).to(tl.float32)
    bend = gate
    if GELU:
        bend = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    tl.store(y + row * width + columns, (gate * tl.sigmoid(bend) * up).to(y.dtype.element_ty), mask=mask)


def launch(gate_up: Tensor, activation: str) -> Tensor:
    """Return y [R,I] of gate_up [R,2I], gate first. activation: one of `ACTIVATIONS`."""
    assert activation in ACTIVATIONS
    gate_up = gate_up.contiguous()
    rows, width = len(gate_up), gate_up.shape[1] // 2
    y = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(width))
    _gated[(rows, triton.cdiv(width, block))](
        gate_up, y, width, GELU=activation == "gelu_tanh", BLOCK=block, num_warps=4
    )
    return y
