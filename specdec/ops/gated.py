"""The gated MLP, down(act(gate(x)) * up(x)), alone and with the sum and the norm that follow it."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.ops import Matrix, Norm, kernel_for, native
from specdec.ops.linear import UNIT, Product, linear, packed_rows

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}
WIDE = 8 * UNIT  # fewer outputs of gate and up are divided badly among threads


def gated_mlp(gate_up: Matrix, down: Matrix, activation: str) -> Product:
    """Return the MLP as a function of rows [R,H]. gate_up: the rows of gate, and then as many of up."""
    if packed := _packed(gate_up, down, activation):
        own, (wide, narrow), size = native.operator("mlp"), packed, down.out_features
        return lambda x: own(x, wide, narrow, size)
    into, out = (linear(each.weight, each.bias, each.int8) for each in (gate_up, down))
    if kernel := kernel_for("gated", gate_up.weight):
        return lambda x: out(kernel(into(x), activation))
    act, halves = ACTIVATIONS[activation], [down.in_features] * 2

    def mlp(x: Tensor) -> Tensor:
        gate, up = into(x).split_with_sizes(halves, dim=-1)  # 4 us less than `chunk`
        return out(act(gate) * up)

    return mlp


def gated_mlp_add(
    gate_up: Matrix, down: Matrix, activation: str, norm: Norm
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the function (x, normed) -> x + mlp(normed), and its norm."""
    apart = norm.offset or kernel_for("rms_norm", norm.weight) or not native.serves(norm.weight)
    if not apart and (packed := _packed(gate_up, down, activation)):
        own, weight, eps = native.operator("mlp_add"), norm.weight, norm.eps
        return lambda x, normed: own(x, normed, *packed, weight, eps)
    mlp, add_norm = gated_mlp(gate_up, down, activation), norm.bind()
    return lambda x, normed: add_norm(mlp(normed), x)


def _packed(gate_up: Matrix, down: Matrix, activation: str) -> tuple[Tensor, Tensor] | None:
    """Return both weights if one call of our own multiplies with them, else None."""
    inner = down.in_features
    if kernel_for("gated", gate_up.weight) or activation != "silu" or inner % UNIT or inner < WIDE:
        return None
    if gate_up.bias is not None or down.bias is not None:
        return None
    wide, narrow = (packed_rows(each.weight, gate_up.int8) for each in (gate_up, down))
    return None if wide is None or narrow is None else (wide, narrow)


@native.seen_as("specdec_rows.mlp_add.default")
def _seen(residual: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, weight: Tensor, eps: float) -> tuple:
    ops = torch.ops.specdec_rows
    return ops.add_norm(residual, ops.mlp(x, gate_up, down, residual.shape[1]), weight, eps)
