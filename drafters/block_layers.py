"""The switches of a block drafter's forward, and its layers."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from specdec.drafters.layers import DraftLayer, DraftShape
from specdec.model.attention import Attend, Attention
from specdec.model.layers import Linear, ModuleList
from specdec.ops.rope_write import rotate


@dataclass(frozen=True)
class BlockForward:
    """Where the drafters of the family differ.

    rows: slots of the block, including the anchor's. mask_token: id of the tokens after the anchor. label: slot k
    predicts the token at its own position, 'p+k' (DFlash: the anchor's slot drafts nothing), or the next one, 'p+k+1'
    (DSpark, and what DeepSpec calls DFlash: every slot drafts). causal: a slot sees no later one (JetSpec).

    sliding: which layers have a window of `window` positions, the own one counted. window_from: the window ends at the
    position of the slot that looks, 'slot' (z-lab, SpecForge, Automodel), or all slots see the `window` positions
    before the anchor, 'anchor' (speculators). sliding_causal: in these layers a slot sees no later one (all but
    Automodel; speculators and z-lab have a switch).

    convolution: channels of a group in DFlash2's convolutions over the slots (`block_layers.SlotConvolution`); 0: there
    are none.
    """

    rows: int
    mask_token: int
    label: str = "p+k"
    causal: bool = False
    sliding: tuple[bool, ...] = ()
    window: int | None = None
    window_from: str = "slot"
    sliding_causal: bool = True
    convolution: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError for settings that do not exist or contradict each other."""
        if self.label not in ("p+k", "p+k+1"):
            raise ValueError(f"label must be 'p+k' or 'p+k+1' (which token slot k tells), got {self.label!r}")
        if self.window_from not in ("slot", "anchor"):
            raise ValueError(f"window_from must be 'slot' or 'anchor', got {self.window_from!r}")
        if self.drafts < 1:
            raise ValueError(f"a block of {self.rows} rows drafts nothing with label {self.label!r}: give it more rows")
        if any(self.sliding) and (self.window is None or self.window < 1):
            raise ValueError(f"sliding layers need a window of at least 1, got {self.window}")

    @property
    def unused(self) -> int:
        """How many slots at the front draft nothing."""
        return 1 if self.label == "p+k" else 0

    @property
    def drafts(self) -> int:
        """Return the number of tokens that a block drafts."""
        return self.rows - self.unused

    def seen(self, sliding: bool) -> Tensor:
        """[rows, rows] bool: which slots each slot sees in a layer."""
        ahead = torch.arange(self.rows) - torch.arange(self.rows)[:, None]  # slots from the query to the key
        seen = ahead <= 0 if (self.sliding_causal if sliding else self.causal) else ahead < self.rows
        if sliding and self.window is not None and self.window_from == "slot":
            return seen & (ahead.abs() < self.window)
        return seen

    def depths(self) -> Tensor:
        """[rows]: where the window of each slot ends, counted from the anchor."""
        return torch.arange(self.rows) if self.window_from == "slot" else torch.zeros(self.rows, dtype=torch.int64)

    @property
    def span(self) -> int | None:
        """Positions of a window that ends where `depths` says, the last one counted."""
        return self.window if self.window is None or self.window_from == "slot" else self.window + 1


class BlockAttention(Attention):
    """Attention of the block. Its key and value projections serve the context too."""

    def __init__(self, shape: DraftShape):
        """Build projections for inputs of width H, with norms of each query and key head."""
        super().__init__(shape, shape.hidden, qk_norm=True)

    def context(self, features: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Fused features [B,n,H] of context positions -> their keys and values [B,n,K,Dh]."""
        weight = self.qkv.weight[self.heads * self.head_dim :]
        k, v = F.linear(features, weight).unflatten(-1, (2, self.kv_heads, self.head_dim)).unbind(2)
        return rotate(k if self.k_norm is None else self.k_norm(k), *rope), v


class SlotConvolution(nn.Module):
    """Mix each slot with the slot before it, channel by channel, before and after a sublayer (DFlash2).

    The anchor has no slot before it. The fixed shares are summed with moving ones, which groups of channels share and
    which are computed from the sublayer's input at the slot (`Automodel`, draft_qwen3_dflash2.py).
    """

    def __init__(self, hidden: int, group: int):
        """Build fixed shares for `hidden` channels, and moving shares for groups of `group` channels."""
        super().__init__()
        if hidden % group:
            raise ValueError(f"convolution is {group} channels a group, which do not divide the hidden size {hidden}")
        self.shares = nn.Parameter(torch.zeros(2, 2, hidden))  # before and after, own and previous slot
        self.groups = Linear(hidden, 4 * (hidden // group), bias=False)

    def start(self) -> None:
        """A slot is itself."""
        self.shares.zero_()[:, 0] = 1
        self.groups.weight.zero_()

    def around(self, sublayer, x: Tensor, rows: int) -> Tensor:
        """What a sublayer, a function of [B,n,H], makes of blocks of `rows` slots each: x [B,A*rows,H] -> the same."""
        moving = self.groups(x).unflatten(-1, (2, 2, -1)).unbind(2)  # [B,n,2,groups]
        x = _mixed(x, self.shares[0], moving[0], rows)
        return _mixed(sublayer(x), self.shares[1], moving[1], rows)


def _mixed(x: Tensor, shares: Tensor, moving: Tensor, rows: int) -> Tensor:
    """Add shares [2,H] and moving shares [B,A*rows,2,groups] of a slot and the slot before it, of x [B,A*rows,H]."""
    groups = moving.shape[-1]
    slots = x.unflatten(1, (-1, rows))
    before = F.pad(slots[:, :, :-1], (0, 0, 1, 0)).flatten(1, 2).unflatten(-1, (groups, -1))
    own, previous = shares.unflatten(-1, (groups, -1)).unbind(0)
    own_moving, previous_moving = moving[..., None].unbind(2)
    return ((own + own_moving) * x.unflatten(-1, (groups, -1)) + (previous + previous_moving) * before).flatten(2)


class BlockLayer(DraftLayer):
    """A decoder layer as Qwen3 has it, with norms of each query and key head, and DFlash2's convolutions."""

    attention: BlockAttention

    def __init__(self, shape: DraftShape, how: BlockForward):
        """Build the layer, with convolutions of `how.convolution` channels a group if that is not 0."""
        super().__init__(shape, BlockAttention(shape))
        self.rows = how.rows
        self.convolutions: ModuleList[SlotConvolution] | None = None
        if how.convolution:
            self.convolutions = ModuleList(SlotConvolution(shape.hidden, how.convolution) for _ in range(2))

    @override
    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        if self.convolutions is None:
            return super().forward(x, rope, attend)
        attention, mlp = self.convolutions
        mixed = attention.around(lambda y: self.attention(y, rope, attend), self.input_norm(x), self.rows)
        x, normed = self.post_norm(mixed, x)
        return x + mlp.around(self.mlp, normed, self.rows)
