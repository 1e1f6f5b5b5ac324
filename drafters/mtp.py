"""Multi-token prediction heads: a norm for each input, a projection, and one whole decoder layer.

DeepSeek-V3 (arXiv 2412.19437, section 2.2), GLM-4.5, MiMo (arXiv 2505.07608), Qwen3-Next ship one inside the target's
checkpoint. It reads the target's last hidden state, after the final norm, and the target's head makes its logits.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from specdec.drafters.layers import DraftShape, SharedHead, shape_like, start
from specdec.drafters.recurrent import RecurrentDrafter
from specdec.drafters.vocab import DraftVocab
from specdec.model.attention import Attend, Attention
from specdec.model.layers import Freezable, GatedMLP, Linear, ModuleList, NormPair, OffsetRMSNorm, RMSNorm

Function = Callable[..., Tensor]


@dataclass(frozen=True)
class Experts:
    """How tokens find their experts in a mixture-of-experts MLP (GLM-4.5, DeepSeek-V3 and Qwen3-Next).

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

    def __post_init__(self) -> None:
        """Raise ValueError for numbers that contradict each other."""
        choices = 0 < self.chosen <= self.count and 0 < self.kept_groups <= self.groups
        if not choices or self.count % self.groups:
            chosen, groups = f"{self.chosen} of {self.count}", f"{self.kept_groups} of {self.groups}"
            raise ValueError(f"no token can choose {chosen} experts in {groups} groups")


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
        mix = self._few if chosen.numel() <= self.experts.count else self._all
        out = mix(rows, weights, chosen)
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


@dataclass(frozen=True)
class MtpForward:
    """Where MTP heads, and the systems that run them, differ.

    hidden_first: the projection takes [hidden, embedding] (MiMo) instead of [embedding, hidden] (all others).
    feedback: a head that drafts more than one token feeds back its state after the final norm, 'post' (SGLang,
    transformers, vLLM for MiMo), or before it, 'pre' (vLLM for DeepSeek). blank_first: the embedding at draft position
    0 is zero (vLLM); elsewhere it is not. offset_norms: the weights of norms are stored less 1 (Qwen3-Next). experts:
    those of the layer's MLP, which is dense if there are none.
    """

    hidden_first: bool = False
    feedback: str = "post"
    blank_first: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    gate: bool = False
    rotary_dim: int | None = None
    offset_norms: bool = False
    experts: Experts | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for settings that do not exist."""
        if self.feedback not in ("pre", "post"):
            raise ValueError(f"feedback must be 'pre' or 'post' (the final norm), got {self.feedback!r}")
        if self.rotary_dim is not None and (self.rotary_dim < 2 or self.rotary_dim % 2):
            raise ValueError(f"rotary_dim must be an even number of at least 2, got {self.rotary_dim}")


class MtpLayer(Freezable):
    """One head: z = project([norm(embedding), norm(hidden)]), a pre-norm decoder layer over z."""

    def __init__(self, shape: DraftShape, switches: MtpForward):
        """Build one head."""
        super().__init__()
        h, how = shape.hidden, switches
        norm = OffsetRMSNorm if how.offset_norms else RMSNorm
        self.hidden_first = how.hidden_first
        self.embed_norm = norm(h, shape.eps)
        self.hidden_norm = norm(h, shape.eps)
        norms = self.embed_norm, self.hidden_norm
        self.norms = NormPair(*(norms[::-1] if self.hidden_first else norms))
        self.project = Linear(2 * h, h, bias=False)
        self.input_norm = norm(h, shape.eps)
        self.attention = Attention(shape, h, how.qkv_bias, how.qk_norm, how.gate, how.rotary_dim, norm=norm)
        self.post_norm = norm(h, shape.eps)
        self.mlp = MoE(h, how.experts) if how.experts else GatedMLP(h, shape.intermediate)
        self.norm = norm(h, shape.eps)

    @override
    def bind(self) -> Callable[..., tuple[Tensor, Tensor]]:
        add_mlp = self.mlp.bind_add(self.norm) if isinstance(self.mlp, GatedMLP) else self._add_mlp
        return self._layer(self.norms.bind(), self.project.bind(), self.input_norm.bind(), add_mlp)

    def forward(self, *inputs) -> tuple[Tensor, Tensor]:
        """Embeddings, hidden states, rope and `Attend` -> the hidden state before the final norm and after it."""
        return (self.frozen or self._layer(self.norms, self.project, self.input_norm, self._add_mlp))(*inputs)

    def _layer(
        self, pair: Function, project: Function, input_norm: Function, add_mlp: Callable
    ) -> Callable[..., tuple[Tensor, Tensor]]:
        """`forward` by these parts, which are bound, or, while they learn, modules."""
        hidden_first, add_attention, post_norm = self.hidden_first, self.attention.add, self.post_norm

        def layer(embeds: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> tuple[Tensor, Tensor]:
            x = project(pair(hidden, embeds) if hidden_first else pair(embeds, hidden))
            return add_mlp(*add_attention(x, input_norm(x), post_norm, rope, attend))

        return layer

    def _add_mlp(self, x: Tensor, normed: Tensor) -> tuple[Tensor, Tensor]:
        return self.norm(self.mlp(normed), x)


class Mtp(RecurrentDrafter):
    """One head applied again and again, or several: head l drafts level l, the last one all further levels."""

    switches: MtpForward

    def __init__(
        self,
        shape: DraftShape,
        tap: int,
        vocab: DraftVocab,
        embedding: Tensor,
        head: Tensor,
        heads: int = 1,
        forward: MtpForward | None = None,
    ):
        """Build MTP heads over the target's last hidden state.

        tap: the target's number of layers. embedding, head [V,H]: the target's, shared and frozen.
        """
        switches = forward or MtpForward()
        super().__init__(shape, (tap,), vocab, embedding, heads, switches.rotary_dim)
        self.switches = switches
        self.blocks = ModuleList(MtpLayer(shape, switches) for _ in range(heads))
        self.head = SharedHead(head, vocab.ids)

    @override
    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        embeds = super().embed(tokens, positions)
        return embeds * (positions > 0)[..., None] if self.switches.blank_first else embeds

    @override
    def fuse(self, feats: Tensor) -> Tensor:
        return feats

    @override
    def layer(self, embeds: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor], attend: Attend, index: int) -> Tensor:
        before, after = self.blocks[index](embeds, hidden, rope, attend)
        return after if self.switches.feedback == "post" else before

    @override
    def readout(self, hidden: Tensor, index: int) -> Tensor:
        return hidden if self.switches.feedback == "post" else self.blocks[index].norm(hidden)

    def start_from(self, target) -> None:
        """The projection passes the hidden state through, at its usual scale, to the target's own head."""
        h, scale = self.shape.hidden, target.final_scale()
        for block in self.blocks:
            at = 0 if self.switches.hidden_first else h
            block.project.weight.zero_()
            block.project.weight[:, at : at + h] = torch.eye(h)
            block.hidden_norm.weight.fill_(scale)
            block.norm.weight.fill_(scale)


def create(
    target,
    *,
    vocab: DraftVocab | None = None,
    heads: int = 1,
    feedback: str = "post",
    hidden_first: bool = False,
    init: str = "target",
    **shape,
) -> Mtp:
    """Fresh MTP heads for a target. shape: sizes as in `layers.shape_like`; init: see `layers.start`."""
    if heads < 1:
        raise ValueError(f"heads must be at least 1, got {heads}")
    config = target.config
    vocab, ends = vocab or DraftVocab(config.vocab), (target.embed.weight, target.head.weight)
    switches = MtpForward(feedback=feedback, hidden_first=hidden_first)
    drafter = Mtp(shape_like(target, **shape), config.layers, vocab, *ends, heads, switches)
    start(drafter, target, init)
    return drafter
