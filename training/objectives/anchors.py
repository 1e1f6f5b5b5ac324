"""Which blocks of a batch of texts are trained on, and which of their slots.

An anchor at position p has p tokens of its own document before it, 1 at least. Drafting slot j predicts the
token at p + 1 + j, whatever the drafter's label: with `p+k` it is the block's row j + 1, with `p+k+1` its row j.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.model.attention import document_positions

WHERE = ("next", "whole")
COUNTS = ("label", "prefix", "previous")


@dataclass
class Slots:
    """The n blocks of a batch with training tokens, W slots each."""

    anchors: Tensor  # [B,A] positions, ascending in each row
    chosen: tuple[Tensor, Tensor]  # row and column [n] of the n blocks in `anchors`
    column: Tensor  # [n,W] at which the target predicts a slot's token, one before that token's position
    mask: Tensor  # [n,W] weight of a slot, 0 if it is not trained on
    visible: Tensor | None = None  # [B,A] how many tokens of a block are shown to it; None: the anchor alone

    @property
    def since(self) -> Tensor:
        """[n,W] number of slots before each one, from the first that is not shown its token."""
        slots = torch.arange(self.mask.shape[1], device=self.mask.device).expand_as(self.mask)
        return slots if self.visible is None else slots - (self.visible[self.chosen][:, None] - 1)

    @property
    def here(self) -> tuple[Tensor, Tensor]:
        """Rows and columns [n,W] of the texts at which the target predicts."""
        return self.chosen[0][:, None].expand_as(self.column), self.column


def draw(count: int, where: str, rows: int, loss_mask: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
    """At most `count` anchors of each text, uniform among the possible ones, without replacement.

    where: 'next', the anchor's token and the next one are training tokens; 'whole', the anchor's token is, and all
    `rows` rows of the block are in its document. loss_mask, documents [B,T]. Returns positions [B,A], ascending, and
    which exist [B,A]: a text may have fewer. While gradients are off, as in evaluation, the draw is always the same.
    """
    learnt, length = loss_mask > 0, loss_mask.shape[1]
    if where == "next":
        after = learnt[:, 1:] & (documents[:, 1:] == documents[:, :-1])
        may = learnt & F.pad(after, (0, 1), value=False)
    else:
        ends = F.pad(documents[:, rows - 1 :], (0, min(rows - 1, length)), value=-1)
        may = learnt & (ends == documents)
    may = may & (document_positions(documents) > 0)
    lots = torch.rand(may.shape, device=may.device, generator=_generator(may.device)).masked_fill_(~may, -1)
    most = min(count, max(int(may.sum(1).max()), 1))  # waits for the device, once a training step
    at = lots.topk(most, dim=1).indices.sort(dim=1).values
    there = may.gather(1, at)
    return at.masked_fill(~there, min(1, length - 1)), there


def _generator(device: torch.device) -> torch.Generator | None:
    return None if torch.is_grad_enabled() else torch.Generator(device).manual_seed(0)


def draw_visible(base: float, anchors: Tensor, rows: int) -> Tensor:
    """Draw how many tokens the block after each anchor [B,A] sees, including the anchor (VP-Drafter, arXiv 2606.04446).

    The number n is 2 to rows - 1 in a block of `rows` rows, with a probability proportional to base^n.
    """
    least = min(2, rows - 1)
    odds = base ** torch.arange(least, max(rows, least + 1), device=anchors.device, dtype=torch.float32)
    drawn = torch.multinomial(odds, anchors.numel(), replacement=True, generator=_generator(anchors.device))
    return drawn.view(anchors.shape) + least


def slots(
    anchors: Tensor,
    there: Tensor,
    width: int,
    counts: str,
    loss_mask: Tensor,
    documents: Tensor,
    weights: Tensor | None,
    visible: Tensor | None = None,
) -> Slots:
    """The slots of blocks, `width` each, that draft tokens of their own document.

    counts: which of them count. 'label': those whose token is a training token; 'prefix': those before the first one
    whose token is not; 'previous': those after a training token. weights [B,T]: of each token; None: 1. visible
    [B,A]: how many tokens a block is shown, whose slots do not count; None: the anchor alone.
    """
    length = loss_mask.shape[1]
    label = anchors[..., None] + 1 + torch.arange(width, device=anchors.device)  # [B,A,W]
    row = torch.arange(len(anchors), device=anchors.device)[:, None, None]
    inside, label = label < length, label.clamp(max=length - 1)
    inside = inside & (documents[row, label] == documents.gather(1, anchors)[..., None]) & there[..., None]
    learnt = loss_mask[row, label - 1 if counts == "previous" else label]
    mask = learnt * inside
    if counts == "prefix":
        mask = mask.cumprod(-1)
    if weights is not None:
        mask = mask * weights[row, label]
    if visible is not None:
        mask = mask * (torch.arange(1, width + 1, device=mask.device) >= visible[..., None])
    return gathered(anchors, mask, visible)


def gathered(anchors: Tensor, mask: Tensor, visible: Tensor | None = None) -> Slots:
    """Return the blocks in which any slot counts, from anchors [B,A] and the weights of their slots [B,A,W]."""
    row, place = (mask > 0).any(-1).nonzero(as_tuple=True)
    chosen = row, place
    column = anchors[chosen][:, None] + torch.arange(mask.shape[2], device=anchors.device)
    return Slots(anchors, chosen, column, mask[chosen], visible)
