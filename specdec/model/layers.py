"""The pieces that target and drafters share: RMSNorm, rotary positions, the gated MLP, and row-wise linear maps."""

import functools
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.ops import kernel_for, native
from specdec.ops.linear import check_int8, gated_mlp, gated_mlp_add, linear


class Freezable(nn.Module):
    """A module whose `bind` gives what it computes as a plain function of its present weights.

    A decoder calls tens of modules a token. At every call torch looks for hooks, parameters and submodules anew; for
    the demo target that takes a seventh of the time of a token (docs/log.md). So the modules are bound once per
    decoding, and then functions are called. The functions see the weights as they lay in memory when they were bound:
    bind again after moving or casting the module.
    """

    frozen: Callable[..., Tensor] | None = None  # the function that calls take until `unfreeze`

    def freeze(self) -> None:
        self.frozen = self.bind()

    def unfreeze(self) -> None:
        self.frozen = None

    def bind(self) -> Callable[..., Tensor]:
        raise NotImplementedError

    def __call__(self, *inputs) -> Tensor:
        if self.frozen is None:
            return super().__call__(*inputs)
        return self.forward(*inputs)  # without a look for hooks

    def forward(self, *inputs) -> Tensor:
        return (self.frozen or self.bind())(*inputs)


def freeze(model: nn.Module) -> None:
    """Bind every part of a model once, for all calls until `unfreeze`. Its weights must stay as they are."""
    for module in model.modules():
        if isinstance(module, Freezable):
            module.freeze()


def unfreeze(model: nn.Module) -> None:
    """Let every part of a model see its present weights at each call again."""
    for module in model.modules():
        if isinstance(module, Freezable):
            module.unfreeze()


def round_weights(drafter: nn.Module) -> None:
    """Let a drafter's products take weights in int8. ValueError where there is no such product."""
    for module in drafter.modules():
        if isinstance(module, LinearMap):
            check_int8(module.weight.device)
            module.int8 = True


@functools.cache
def constant(value: float, dtype: torch.dtype) -> Tensor:
    """A scalar tensor on the CPU, made once: also for autograd, whoever asks first."""
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=dtype)


class RMSNorm(Freezable):
    """y = x / sqrt(mean(x^2) + eps) * weight, with the statistics in fp32, or finer, as transformers does."""

    offset = False  # the weight is stored less 1
    frozen_add: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def freeze(self) -> None:
        super().freeze()
        self.frozen_add = self.bind_add()

    def unfreeze(self) -> None:
        super().unfreeze()
        self.frozen_add = None

    def bind(self) -> Callable[[Tensor], Tensor]:
        if kernel := kernel_for("rms_norm", self.weight):
            return partial(kernel, weight=self.weight, eps=self.eps, offset=self.offset)
        return self.bind_eager()

    def bind_add(self) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """(x, y) -> x + y, and its norm."""
        if kernel := kernel_for("rms_norm", self.weight):
            weight, eps, offset = self.weight, self.eps, self.offset
            return lambda x, y: kernel(y, weight, eps, offset, residual=x)
        if not self.offset and (own := native.bound("add_norm", self.weight, self.weight, self.eps)):
            return own
        norm = self.bind_eager()

        def add_norm(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            x = x + y
            return x, norm(x)

        return add_norm

    def add(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """x + y, and its norm."""
        if self.frozen_add is not None:
            return self.frozen_add(x, y)
        x = x + y
        return x, self(x)

    def bind_eager(self) -> Callable[[Tensor], Tensor]:
        if own := native.bound("rms_norm", self.weight, self.weight, self.eps):
            return own
        weight, normalise = self.weight, self.bind_normalise()
        return lambda x: normalise(x).to(x.dtype) * weight

    def bind_normalise(self) -> Callable[[Tensor], Tensor]:
        """x -> x / sqrt(mean(x^2) + eps), in fp32 or finer."""
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        device, share = self.weight.device, 1 / len(self.weight)
        # On a GPU it is filled there, each time: a copy would synchronise, and a kept one might belong to a CUDA graph.
        on_cpu = device.type == "cpu"
        epsilon = constant(self.eps, wide) if on_cpu else torch.full((), self.eps, dtype=wide, device=device)

        def normalise(x: Tensor) -> Tensor:
            x = x.to(wide)
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # fewer operators than `F.rms_norm` on the CPU
            return x * torch.addcmul(epsilon, length, length, value=share).rsqrt_()

        return normalise

    def gain(self) -> Tensor:
        """[size], what a normalised vector is multiplied by."""
        return self.weight


class OffsetRMSNorm(RMSNorm):
    """Gemma's RMSNorm: the weight is stored less 1, and applied before the result is rounded."""

    offset = True

    def __init__(self, size: int, eps: float):
        super().__init__(size, eps)
        nn.init.zeros_(self.weight)

    def bind_eager(self) -> Callable[[Tensor], Tensor]:
        gain, normalise = self.gain(), self.bind_normalise()
        return lambda x: (normalise(x) * gain).to(x.dtype)

    def gain(self) -> Tensor:
        return 1 + self.weight.float()


class LinearMap(Freezable):
    """x weight.T + bias. Its bound function takes rows x [R,in] to [R,out] by the fastest product for few rows."""

    int8 = False  # bound, it may take its weight rounded (`round_weights`)

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """The matrices [out,.] whose products with the parts of x are added; here one."""
        return (self.weight,)

    def bind(self) -> Callable[[Tensor], Tensor]:
        return linear(self.weight, self.bias, self.int8)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return F.linear(x, self.weight, self.bias)
        product = self.frozen or self.bind()
        if x.ndim == 2:
            return product(x)
        y = product(x.flatten(0, -2))
        return y.view(*x.shape[:-1], y.shape[-1])


class Linear(LinearMap, nn.Linear):
    """nn.Linear, as a `LinearMap`."""


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class GatedMLP(Freezable):
    """down(act(gate(x)) * up(x)). Gate and up lie in one matrix, gate rows first. Bound, it takes rows [R,H]."""

    def __init__(self, hidden: int, intermediate: int, bias: bool = False, activation: str = "silu"):
        super().__init__()
        self.activation = activation
        self.gate_up = Linear(hidden, 2 * intermediate, bias=bias)
        self.down = Linear(intermediate, hidden, bias=bias)

    def bind(self) -> Callable[[Tensor], Tensor]:
        gate_up, down, activation = self.gate_up.bind(), self.down.bind(), ACTIVATIONS[self.activation]
        if kernel := kernel_for("gated", self.gate_up.weight):
            name = self.activation
            return lambda x: down(kernel(gate_up(x), name))

        if own := gated_mlp(self.gate_up, self.down, self.activation, self.gate_up.int8):
            return own
        halves = [self.down.in_features] * 2

        def mlp(x: Tensor) -> Tensor:
            gate, up = gate_up(x).split_with_sizes(halves, dim=-1)  # 4 us less than `chunk`
            return down(activation(gate) * up)

        return mlp

    def bind_add(self, norm: RMSNorm) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """(x, normed) -> x + mlp(normed), and its norm."""
        parts = self.gate_up, self.down, self.activation, norm.weight, norm.eps
        plain = norm.offset or kernel_for("rms_norm", norm.weight) or kernel_for("gated", norm.weight)
        if not plain and (own := gated_mlp_add(*parts)):
            return own
        mlp, add_norm = self.bind(), norm.bind_add()
        return lambda x, normed: add_norm(x, mlp(normed))

    def forward(self, x: Tensor) -> Tensor:
        mlp = self.frozen or self.bind()
        return mlp(x) if x.ndim == 2 else mlp(x.flatten(0, -2)).view_as(x)


def check_heads(heads: int, kv_heads: int) -> None:
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"{heads} attention heads cannot share {kv_heads} key-value heads evenly")
