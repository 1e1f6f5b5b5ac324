"""Layers that targets and drafters share: RMSNorm, gated MLP and row-wise linear maps."""

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from specdec.ops.gated import gated_mlp, gated_mlp_add
from specdec.ops.linear import has_int8, linear
from specdec.ops.rms_norm import norm_pair, rms_norm

if TYPE_CHECKING:
    M = TypeVar("M", bound=nn.Module)

    class ModuleList(nn.ModuleList, Generic[M]):
        """`nn.ModuleList` that is generic in the class of its modules."""

        def __init__(self, modules: Iterable[M] | None = None) -> None:
            """Take the modules in order."""

        @override
        def __iter__(self) -> Iterator[M]: ...
        @override
        def __getitem__(self, index: int) -> M: ...  # type: ignore[override]
else:
    ModuleList = nn.ModuleList


class Copyable(nn.Module):
    """A module whose copies, and pickles, have no cache, no user and no functions that are bound to its weights."""

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in vars(self).items()
            if name not in ("frozen", "adds", "parts", "cache", "user")
        }


class Freezable(Copyable):
    """A module whose `bind` returns its computation as a plain function of its present weights.

    A decoder calls tens of modules a token. At every call torch looks up hooks, parameters and submodules; for
    the demo target that takes a seventh of the time of a token (docs/log.md). So the modules are bound once per
    decoding, and then functions are called. The functions see the weights as they lay in memory when they were bound:
    bind again after moving or casting the module.
    """

    frozen: Callable[..., Any] | None = None  # the function that calls take until `unfreeze`

    def freeze(self) -> None:
        """Bind the module once: later calls use the weights as they are in memory now."""
        self.frozen = self.bind()

    def bind(self) -> Callable[..., Any]:
        """Return the computation as a plain function of the present weights."""
        raise NotImplementedError

    @override
    def __call__(self, *inputs: Any) -> Any:
        if self.frozen is None:
            return super().__call__(*inputs)
        return self.forward(*inputs)  # without a look for hooks

    @override
    def forward(self, *inputs: Any) -> Any:
        return (self.frozen or self.bind())(*inputs)


def weight_state(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Return what changes when a tensor moves or its values do. Inference tensors have no version."""
    return [(x.data_ptr(), 0 if x.is_inference() else x._version) for x in tensors]


def freeze(model: nn.Module) -> None:
    """Bind every part of a model once, for all calls until `unfreeze`. Its weights must stay as they are."""
    for module in model.modules():
        if isinstance(module, Freezable):
            module.freeze()


def unfreeze(model: nn.Module) -> None:
    """Let every part of a model see its present weights at each call again."""
    for module in model.modules():
        if isinstance(module, Freezable):
            module.frozen = None


def round_weights(drafter: nn.Module) -> None:
    """Let a drafter's products take weights in int8. ValueError where there is no such product."""
    for module in drafter.modules():
        if isinstance(module, LinearMap):
            if not has_int8(module.weight.device):
                raise ValueError("draft_dtype int8 needs a CPU of the x86 family: give fp32 or bf16, or leave it out")
            module.int8 = True


class RMSNorm(Freezable):
    """y = x / sqrt(mean(x^2) + eps) * weight. With a residual it returns the sum of both, and the norm of the sum."""

    offset: bool = False  # the weight is stored less 1
    weight: Tensor

    def __init__(self, size: int, eps: float):
        """Norm vectors of `size` elements; `eps` is added to the mean square."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    @override
    def bind(self) -> Callable[..., Any]:
        return rms_norm(self.weight, self.eps, self.offset)

    def gain(self) -> Tensor:
        """Return the factor of each element of a normalised vector, [size]."""
        return self.weight


class OffsetRMSNorm(RMSNorm):
    """Gemma's RMSNorm: the weight is stored less 1, and applied before the result is rounded."""

    offset = True

    def __init__(self, size: int, eps: float):
        """See `RMSNorm`; the stored weight starts at 0, a factor of 1."""
        super().__init__(size, eps)
        nn.init.zeros_(self.weight)

    @override
    def gain(self) -> Tensor:
        return 1 + self.weight.float()


class NormPair(Freezable):
    """Two norms whose results for two inputs are concatenated. The norms are parts of another module."""

    def __init__(self, first: RMSNorm, second: RMSNorm):
        """Use two norms that another module owns: neither becomes a submodule."""
        super().__init__()
        self.norms = first, second

    @override
    def bind(self) -> Callable[[Tensor, Tensor], Tensor]:
        return norm_pair(*self.norms)


class LinearMap(Freezable):
    """x weight.T + bias. Its bound function takes rows x [R,in] to [R,out] by the fastest product for few rows."""

    int8: bool = False  # bound, it may take its weight rounded (`round_weights`)
    weight: Tensor
    bias: Tensor | None

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """Return the matrices [out,.] whose products with the parts of x are added; here one."""
        return (self.weight,)

    @override
    def bind(self) -> Callable[[Tensor], Tensor]:
        return linear(self.weight, self.bias, self.int8)

    @override
    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return F.linear(x, self.weight, self.bias)
        product = self.frozen or self.bind()
        if x.ndim == 2:
            return product(x)
        y = product(x.flatten(0, -2))
        return y.view(*x.shape[:-1], y.shape[-1])


class Linear(LinearMap, nn.Linear):
    """`nn.Linear` as a `LinearMap`."""

    bias: Tensor | None  # type: ignore[assignment]  # torch leaves out the None


class GatedMLP(Freezable):
    """down(act(gate(x)) * up(x)). Gate and up share one matrix, gate rows first. Bound, it takes rows [R,H]."""

    def __init__(self, hidden: int, intermediate: int, bias: bool = False, activation: str = "silu"):
        """Map `hidden` to `hidden` elements through `intermediate` ones; `activation` names the gate's function."""
        super().__init__()
        self.activation = activation
        self.gate_up = Linear(hidden, 2 * intermediate, bias=bias)
        self.down = Linear(intermediate, hidden, bias=bias)

    @override
    def bind(self) -> Callable[[Tensor], Tensor]:
        return gated_mlp(self.gate_up, self.down, self.activation)

    def bind_add(self, norm: RMSNorm) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Return the function (x, normed) -> x + mlp(normed), and its norm."""
        return gated_mlp_add(self.gate_up, self.down, self.activation, norm)

    @override
    def forward(self, x: Tensor) -> Tensor:
        mlp = self.frozen or self.bind()
        return mlp(x) if x.ndim == 2 else mlp(x.flatten(0, -2)).view_as(x)


def check_heads(heads: int, kv_heads: int) -> None:
    """Raise ValueError unless `kv_heads` divides `heads`, both of them positive."""
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"{heads} attention heads cannot share {kv_heads} key-value heads evenly")
