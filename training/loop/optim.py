"""Optimisers and the learning-rate schedule."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from specdec.training.loop.parallel import full, sharded_as

TABLES = ("head", "embed")  # in the names of matrices that are tables of tokens, for which Muon is not suitable


class Muon(torch.optim.Muon):
    """torch's own (Jordan et al. 2024), but for its products in bf16: a CPU that has none takes them in fp32.

    For such a processor torch multiplies bf16 in a plain loop, which took half of a training step.
    """

    @torch.no_grad()
    @override
    def step(self, closure=None):
        if fast_bf16(self.param_groups[0]["params"][0].device):
            return super().step(closure)
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step(p, **group)
        return loss

    def _step(self, p: Any, lr: float, weight_decay: float, momentum: float, **group) -> None:
        held = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
        held.lerp_(p.grad, 1 - momentum)
        update = p.grad.lerp(held, momentum) if group["nesterov"] else held
        update = orthogonal(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
        p.mul_(1 - lr * weight_decay)
        p.add_(update, alpha=-lr * math.sqrt(max(1, p.shape[0] / p.shape[1])))


def fast_bf16(device: torch.device) -> bool:
    """Whether products in bf16 are no slower than in fp32."""
    return device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def orthogonal(x: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """About U V^T of x = U S V^T, by a quintic Newton-Schulz iteration, as torch.optim.Muon has it, in x's dtype."""
    a, b, c = coefficients
    wide = x.T if x.shape[0] > x.shape[1] else x
    wide = wide / wide.norm().clamp(min=eps)
    for _ in range(steps):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if x.shape[0] > x.shape[1] else wide


class Optimizers:
    """AdamW for everything, or Muon for the matrices of the layers and AdamW for the rest, stepped as one."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, Tensor]],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        muon_lr: float | None = None,
    ):
        """Divide the parameters between AdamW, with `lr` and `betas`, and Muon, with `muon_lr` if that is given."""
        named = [(n, p) for n, p in parameters if p.requires_grad]
        muon = [p for n, p in named if muon_lr and p.ndim == 2 and not any(word in n for word in TABLES)]
        chosen = {id(p) for p in muon}
        rest = [p for _, p in named if id(p) not in chosen]
        self.parameters = [p for _, p in named]
        self.parts: list[tuple[torch.optim.Optimizer, float]] = []
        if muon and muon_lr:
            self.parts.append((Muon(muon, lr=muon_lr, momentum=0.95, weight_decay=weight_decay), muon_lr))
        if rest:
            self.parts.append((torch.optim.AdamW(rest, lr=lr, betas=betas, weight_decay=weight_decay), lr))

    def step(self, scale: float, clip: float) -> float:
        """Clip the gradient, step at the rates times `scale` if its norm is finite, and return that norm, unclipped."""
        norm = full(torch.nn.utils.clip_grad_norm_(self.parameters, clip)).item()
        if not math.isfinite(norm):
            return norm
        for optimizer, lr in self.parts:
            for group in optimizer.param_groups:
                group["lr"] = lr * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return norm

    def state_dict(self) -> list[dict]:
        """The states of all optimisers, with full tensors in place of shards; every process must call it."""
        return [full(optimizer.state_dict()) for optimizer, _ in self.parts]

    def load_state_dict(self, states: list[dict]) -> None:
        """Raises ValueError if the states are of other optimisers or of other parameters."""
        if len(states) != len(self.parts):
            raise ValueError("the states are of other optimisers")
        for (optimizer, _), state in zip(self.parts, states, strict=True):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            moments = {
                i: {k: sharded_as(v, parameters[i]) if v.shape == parameters[i].shape else v for k, v in held.items()}
                for i, held in state["state"].items()
            }
            optimizer.load_state_dict(state | {"state": moments})


def schedule(step: int, steps: int, warmup: int, kind: str = "cosine") -> float:
    """Factor of the learning rate at 0-based `step`: a linear warm-up, then constant, or linear or cosine to 0."""
    if step < warmup:
        return (step + 1) / warmup
    left = (steps - step) / max(steps - warmup, 1)
    return {"constant": 1.0, "linear": left, "cosine": 0.5 * (1 - math.cos(math.pi * left))}[kind]
