"""Rotary positions: what a config says about them, and the tables of cos and sin."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of a model, as its config states it.

    `scaling` is 'default', 'linear' (positions divided by `factor`) or 'llama3' (Llama 3.1's frequency-dependent
    interpolation: long wavelengths divided by `factor`, short ones unchanged, a ramp between).
    """

    theta: float = 10000.0
    scaling: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192

    def fault(self) -> str:
        """Return, in one clause, why this rope is no rotation; empty if it is one."""
        for name, number in (("rope_theta", self.theta), ("the factor of rope_scaling", self.factor)):
            if not 0 < number < math.inf:
                return f"{name} is {number:g}, and must be above 0"
        return ""

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        """Return the frequencies [Dh/2] fp32, in radians per position."""
        inv = 1.0 / (self.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
        if self.scaling == "linear":
            return inv / self.factor
        if self.scaling != "llama3":
            return inv
        wavelength, low, high = 2 * math.pi / inv, self.low_freq_factor, self.high_freq_factor
        ramp = (self.original_context / wavelength - low) / (high - low)
        blended = torch.where(
            wavelength < self.original_context / high, inv, (1 - ramp) * inv / self.factor + ramp * inv
        )
        return torch.where(wavelength > self.original_context / low, inv / self.factor, blended)

    def tables(self, head_dim: int, positions: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin [positions, Dh] fp32. The first half of sin is negative: one roll does `rotate_half`."""
        angles = torch.outer(torch.arange(positions).float(), self.inverse_frequencies(head_dim))
        sin = angles.sin()
        return torch.cat([angles.cos()] * 2, dim=-1), torch.cat([-sin, sin], dim=-1)


GROWTH = 2048  # positions by which the table grows


class RopeTable(nn.Module):
    """Cos and sin of positions 0..S-1 in one table [S, 2 Dh], so that one look-up finds both.

    All layers share it. It grows on demand, outside a round.
    """

    table: Tensor

    def __init__(self, rope: Rope, head_dim: int):
        """Start with an empty table for heads of `head_dim` elements; call `reserve` before `forward`."""
        super().__init__()
        self.rope, self.head_dim = rope, head_dim
        self.register_buffer("table", torch.empty(0, 2 * head_dim), persistent=False)

    def reserve(self, positions: int, like: Tensor) -> None:
        """Grow the table to at least `positions`, in few sizes: compiled functions belong to one size each."""
        positions += -positions % GROWTH
        known = self.table
        if len(known) < positions or known.device != like.device or known.dtype != like.dtype:
            cos, sin = self.rope.tables(self.head_dim, max(positions, len(known)))
            # The tables are made in fp32 and rounded once, as transformers does.
            self.table = torch.cat([cos, sin], dim=-1).to(like)

    @override
    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin [B,N,1,Dh] at positions [B,N], as views of one tensor."""
        cos, sin = F.embedding(positions, self.table).unsqueeze(2).split_with_sizes([self.head_dim] * 2, dim=-1)
        return cos, sin
