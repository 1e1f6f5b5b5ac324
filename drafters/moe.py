"""A mixture-of-experts MLP, as the MTP layers of GLM-4.5, DeepSeek-V3 and Qwen3-Next have it."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.model.layers import GatedMLP, Linear


@dataclass(frozen=True)
class Experts:
    """How tokens find their experts.

    score 'sigmoid' (DeepSeek-V3, GLM-4.5): the choice is made among scores plus a learnt bias, in the `kept_groups`
    best of `groups` groups; 'softmax' (Qwen): among probabilities. `normalise` makes the weights of the chosen sum to
    one, `scale` multiplies them. `shared` is the width of the expert that all tokens take, if `shared_gate` gated.
    """

    count: int
    chosen: int
    width: int
    score: str = "softmax"
    normalise: bool = True
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    shared: int = 0
    shared_gate: bool = False


class MoE(nn.Module):
    """sum_e w_e(x) down_e(silu(gate_e x) * up_e x) over the chosen experts, plus the shared one."""

    def __init__(self, hidden: int, experts: Experts):
        """Build a router, `experts.count` experts and, if configured, the shared expert, for inputs [...,hidden]."""
        super().__init__()
        self.experts = experts
        self.router = Linear(hidden, experts.count, bias=False)
        self.router_bias = nn.Parameter(torch.zeros(experts.count)) if experts.score == "sigmoid" else None
        self.gate_up = nn.Parameter(torch.randn(experts.count, 2 * experts.width, hidden) * 0.02)
        self.down = nn.Parameter(torch.randn(experts.count, hidden, experts.width) * 0.02)
        self.shared = GatedMLP(hidden, experts.shared) if experts.shared else None
        self.shared_gate = Linear(hidden, 1, bias=False) if experts.shared_gate else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the mixture [...,H] for x [...,H]."""
        rows = x.flatten(0, -2)
        weights, chosen = self.route(rows)
        out = (
            self._few(rows, weights, chosen)
            if chosen.numel() <= self.experts.count
            else self._all(rows, weights, chosen)
        )
        if self.shared is not None:
            shared = self.shared(rows)
            out = out + (shared if self.shared_gate is None else self.shared_gate(rows).sigmoid() * shared)
        return out.view_as(x)

    def route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights and indices [R,C] of the C chosen experts of each row [R,H]."""
        how = self.experts
        logits = F.linear(rows.float(), self.router.weight.float())
        if self.router_bias is None:  # by softmax
            weights, chosen = logits.softmax(-1).topk(how.chosen, dim=-1)
        else:
            scores = logits.sigmoid()
            grouped = (scores + self.router_bias.float()).unflatten(-1, (how.groups, -1))
            if how.kept_groups < how.groups:
                best = grouped.topk(2, dim=-1).values.sum(-1).topk(how.kept_groups, dim=-1).indices
                selected = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, True)
                grouped = grouped.masked_fill(~selected[..., None], -torch.inf)
            chosen = grouped.flatten(-2).topk(how.chosen, dim=-1).indices
            weights = scores.gather(-1, chosen)
        if how.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return (weights * how.scale).to(rows.dtype), chosen

    def _few(self, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Read the weights of the chosen experts only: for the few rows of a tree level."""
        gate, up = torch.einsum("rcih,rh->rci", self.gate_up[chosen], rows).chunk(2, dim=-1)
        return torch.einsum("rchi,rci->rh", self.down[chosen], F.silu(gate) * up * weights[..., None])

    def _all(self, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Run every expert over all rows, with weight 0 where it was not chosen: static shapes, for a prefill."""
        share = rows.new_zeros(len(rows), self.experts.count).scatter(1, chosen, weights)
        out = torch.zeros_like(rows)
        for expert in range(self.experts.count):
            gate, up = F.linear(rows, self.gate_up[expert]).chunk(2, dim=-1)
            out = out + F.linear(F.silu(gate) * up * share[:, expert : expert + 1], self.down[expert])
        return out
