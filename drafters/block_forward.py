"""The switches of a block drafter's forward."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockForward:
    """Where the drafters of the family differ.

    rows: slots of the block, the anchor's among them. mask_token: id of the tokens behind the anchor. label: slot k
    tells the token at its own position, 'p+k' (DFlash: the anchor's slot drafts nothing), or the next one, 'p+k+1'
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
        return self.rows - self.unused

    def seen(self, sliding: bool) -> Tensor:
        """[rows, rows] bool: which slots each slot sees in a layer."""
        ahead = torch.arange(self.rows) - torch.arange(self.rows)[:, None]  # how far the key lies ahead of the query
        seen = ahead <= 0 if (self.sliding_causal if sliding else self.causal) else ahead < self.rows
        return seen & (ahead.abs() < self.window) if sliding and self.window_from == "slot" else seen

    def depths(self) -> Tensor:
        """[rows]: where the window of each slot ends, counted from the anchor."""
        return torch.arange(self.rows) if self.window_from == "slot" else torch.zeros(self.rows, dtype=torch.int64)

    @property
    def span(self) -> int | None:
        """Positions of a window that ends where `depths` says, the last one counted."""
        return self.window if self.window is None or self.window_from == "slot" else self.window + 1
