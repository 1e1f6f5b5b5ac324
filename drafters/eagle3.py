"""EAGLE-3: one layer over three fused hidden states of the target (arXiv 2503.01840)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from specdec.drafters.layers import DraftShape, SharedHead, split_sizes, start
from specdec.drafters.recurrent import RecurrentDrafter
from specdec.drafters.vocab import DraftVocab
from specdec.model.attention import Attend, Attention
from specdec.model.ends import state_sizes
from specdec.model.layers import GatedMLP, Linear, LinearMap, ModuleList, NormPair, RMSNorm
from specdec.model.target import check_taps


@dataclass(frozen=True)
class Eagle3Forward:
    """Where trainers of EAGLE-3 heads differ; the default is the EAGLE repository's forward.

    tap_norms: a norm for each tap before `fc` (EAGLE-3.1, `fc_norm`). input_norm: one norm over all of them together
    (speculators, `norm_before_fc`). residual_norm: the residual starts from the normed hidden state (speculators,
    `norm_before_residual`). feedback: the fed-back hidden state is that before or after the final norm, 'pre' or
    'post' (`norm_output` as speculators and vLLM read it). head_norm: the final norm comes before the head
    (`norm_output` as SpecForge reads it). qkv_bias: ModelOpt, with `attention_bias`. qk_norm: speculators with a
    Qwen3 layer.
    """

    tap_norms: bool = False
    input_norm: bool = False
    residual_norm: bool = False
    feedback: str = "pre"
    head_norm: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for settings that do not exist or contradict each other."""
        if self.feedback not in ("pre", "post"):
            raise ValueError(f"feedback must be 'pre' or 'post' (the final norm), got {self.feedback!r}")
        if self.tap_norms and self.input_norm:
            raise ValueError("fc_norm (a norm for each tap) and norm_before_fc (one over all) exclude each other")
        if self.feedback == "post" and not self.head_norm:
            raise ValueError("a head that feeds the normed state back predicts from it too: head_norm must be true")


class Eagle3(RecurrentDrafter):
    """Draft with the published EAGLE-3 head.

    The features of the taps, concatenated from low to high, go through `fc`. The layer attends over [norm(embedding),
    norm(hidden)]. Its output is fed back *before* the final norm, which only the head reads.
    """

    switches: Eagle3Forward

    def __init__(
        self,
        shape: DraftShape,
        taps: tuple[int, ...],
        vocab: DraftVocab,
        embedding: Tensor,
        forward: Eagle3Forward | None = None,
        tap_width: int | None = None,
    ):
        """tap_width: hidden size of the target, where the draft's own is another."""
        super().__init__(shape, taps, vocab, embedding)
        self.switches = switches = forward or Eagle3Forward()
        h, width = shape.hidden, tap_width or shape.hidden
        self.tap_norms = ModuleList(RMSNorm(width, shape.eps) for _ in taps) if switches.tap_norms else None
        self.input_norm = RMSNorm(len(taps) * width, shape.eps) if switches.input_norm else None
        self.fc = Linear(len(taps) * width, h, bias=False)
        self.tap_scale: Tensor | None = None  # [F], by which features are multiplied while training
        self.embed_norm = RMSNorm(h, shape.eps)
        self.hidden_norm = RMSNorm(h, shape.eps)
        self.norms = NormPair(self.embed_norm, self.hidden_norm)
        self.attention = Attention(shape, 2 * h, bias=switches.qkv_bias, qk_norm=switches.qk_norm)
        self.post_norm = RMSNorm(h, shape.eps)
        self.mlp = GatedMLP(h, shape.intermediate)
        self.norm = RMSNorm(h, shape.eps)
        self.head: LinearMap = Linear(h, vocab.size, bias=False)

    @override
    def fuse(self, feats: Tensor) -> Tensor:
        if self.tap_norms is not None:
            streams = feats.chunk(len(self.taps), dim=-1)
            feats = torch.cat([norm(x) for norm, x in zip(self.tap_norms, streams, strict=True)], dim=-1)
        if self.input_norm is not None:
            feats = self.input_norm(feats)
        if self.tap_scale is not None:
            feats = feats * self.tap_scale.to(feats.dtype)
        return self.fc(feats)

    def scaled_fc(self) -> Tensor:
        """The weight of an `fc` that takes features as they are."""
        return self.fc.weight if self.tap_scale is None else self.fc.weight * self.tap_scale

    @override
    def layer(self, embeds: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor], attend: Attend, index: int) -> Tensor:
        x = self.norms(embeds, hidden)
        residual = x[..., hidden.shape[-1] :] if self.switches.residual_norm else hidden
        hidden, normed = self.attention.add(residual, x, self.post_norm, rope, attend)
        hidden = hidden + self.mlp(normed)
        return self.norm(hidden) if self.switches.feedback == "post" else hidden

    @override
    def readout(self, hidden: Tensor, index: int) -> Tensor:
        normed = self.switches.feedback == "post" or not self.switches.head_norm  # already, or never
        return hidden if normed else self.norm(hidden)

    def start_from(self, target) -> None:
        """Initialise the head with the target's rows, and `fc` to pass the last hidden state through if that is tapped.

        The head then reads that state at its usual scale. With `tap_scale`, `fc` passes the deepest tap, after the
        target's final norm if the tap is not the last state. The attention starts at its own position, the only place
        where this layer sees the token just drafted.
        """
        ids, h, deepest = self.vocab.ids, self.shape.hidden, max(self.taps)
        self.head.weight.copy_(target.head.weight if ids is None else target.head.weight[ids])
        last = deepest == target.config.layers
        if last or self.tap_scale is not None:
            at = self.taps.index(deepest) * h
            self.fc.weight.zero_()
            self.fc.weight[:, at : at + h] = torch.eye(h)
            self.norm.weight.copy_(target.final_scale() if last else target.final_gain())
        look_at_itself(self.attention)


@torch.no_grad()
def scale_of(target, taps: tuple[int, ...]) -> Tensor:
    """Return one over the size (`state_sizes`) of each of these hidden states, [F]."""
    return state_sizes(target, taps).reciprocal().repeat_interleave(target.config.hidden)


@torch.no_grad()
def look_at_itself(attention: Attention, score: float = 10.0) -> None:
    """Set queries equal to keys, both computed from the embedding, the first half of their input.

    A position's score with itself is about `score`, and with others, whose embeddings are nearly orthogonal, about 0.
    """
    dim, half = attention.head_dim, attention.qkv.in_features // 2
    keys = torch.stack([nn.init.orthogonal_(torch.empty(dim, half)) for _ in range(attention.kv_heads)])
    keys = F.pad(keys * (score / dim**0.5) ** 0.5, (0, half))
    queries = keys.repeat_interleave(attention.heads // attention.kv_heads, dim=0)
    rows = torch.cat([queries, keys]).flatten(0, 1)
    attention.qkv.weight[: len(rows)].copy_(rows)


def spread_taps(layers: int, count: int) -> tuple[int, ...]:
    """`count` taps from the second layer's output to the last but two's, as DeepSpec and DFlash spread them."""
    if not 2 <= count <= layers - 3:
        raise ValueError(f"cannot spread {count} taps over a target of {layers} layers: give from 2 to {layers - 3}")
    return tuple(2 + round(i * (layers - 4) / (count - 1)) for i in range(count))


def default_taps(layers: int) -> tuple[int, int, int]:
    """Return the published taps, as indices into hidden_states.

    On a shallow target, where these coincide or leave the range, they are a quarter, the middle and the end.
    """
    published = (2, layers // 2, layers - 3)
    if 0 < published[0] < published[1] < published[2]:
        return published
    return (max(1, layers // 4), max(1, (layers + 1) // 2), layers)


def choose_taps(layers: int, taps: tuple[int, ...] | int | str | None) -> tuple[int, ...]:
    """What the setting `taps` of `create` means on a target of so many layers."""
    if isinstance(taps, str):
        if taps not in ("last", "before_last"):
            raise ValueError(f"drafter.taps must be indices, a number, 'last', 'before_last' or null, got {taps!r}")
        low, middle, _ = default_taps(layers)
        shallow = layers - 1 <= middle
        return (low, middle, layers if taps == "last" or shallow else layers - 1)
    return spread_taps(layers, taps) if isinstance(taps, int) else tuple(taps or default_taps(layers))


def create(
    target,
    *,
    vocab: DraftVocab | None = None,
    taps: tuple[int, ...] | int | str | None = None,
    rope_theta: float = 10000.0,
    init: str = "target",
    train_head: bool = True,
    scale_taps: bool = False,
    **settings,
) -> Eagle3:
    """A fresh EAGLE-3 drafter for a target.

    taps: indices; how many to spread over the layers; 'last' or 'before_last' for the default with that hidden state in
    the place of the third. train_head: if false, the head keeps the rows of the target's. scale_taps: with init
    'target', features are divided by their size before `fc`, which is saved as an `fc` of features as they are: what a
    norm for each tap gives, as far as a forward without norms can have it.
    init: see `layers.start`. settings: sizes as in `layers.shape_like`, and fields of `Eagle3Forward`.
    """
    shape, forward = split_sizes(target, settings, rope_theta=rope_theta)
    layers = target.config.layers
    taps = choose_taps(layers, taps)
    check_taps(taps, layers)
    vocab = vocab or DraftVocab(target.vocab)
    drafter = Eagle3(shape, taps, vocab, target.embed.weight, Eagle3Forward(**forward))
    if scale_taps and init == "target":
        drafter.tap_scale = scale_of(target, taps)
    start(drafter, target, init)
    if not train_head:
        drafter.head = SharedHead(target.head.weight, vocab.ids)
    return drafter
