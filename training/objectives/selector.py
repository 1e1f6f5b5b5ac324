"""Loss of a selector (DFlash2): cross-entropy over the candidates of each slot, after the text's own previous token."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from specdec.training.objectives.losses import pieces

MISSING = ("leave", "replace")
CHOOSES = ("text", "target")


class Candidates:
    """The candidates of n blocks of W slots, and what the selector is to choose, as a judge meets the logits."""

    def __init__(self, blocks: int, slots: int, count: int, chooses: str, missing: str, device: torch.device):
        """chooses, missing: as `BlockObjective` takes them."""
        self.ids = torch.zeros(blocks, slots, count, dtype=torch.int64, device=device)
        self.place = torch.zeros(
            blocks, slots, dtype=torch.int64, device=device
        )  # of what is to be chosen; -1: nowhere
        self.chooses, self.missing = chooses, missing

    def meet(self, rows: slice, logits: Tensor, labels: Tensor, choice: Tensor) -> None:
        """Store the best tokens of blocks `rows` by logits [n*W,1,U], and the place of the token to choose among them.

        `labels` [n*W] are draft ids of the text's token, -1 for none, and `choice` [n*W] those of the target's best
        token.
        """
        ids = logits[:, 0].topk(self.ids.shape[2]).indices
        wanted = (labels if self.chooses == "text" else choice)[:, None]
        there = ids == wanted
        if self.missing == "replace":
            ids[:, -1:] = torch.where(there.any(1, keepdim=True) | (wanted < 0), ids[:, -1:], wanted)
            there = ids == wanted
        place = torch.where(there.any(1), there.int().argmax(1), -1)
        self.ids[rows], self.place[rows] = ids.view(self.ids[rows].shape), place.view(self.place[rows].shape)

    @property
    def known(self) -> Tensor:
        """[n,W] 1 where what is to be chosen is a candidate, else 0."""
        return (self.place >= 0).float()

    def losses(self, base: Tensor, low: Tensor, head: Tensor, selector: Tensor) -> Tensor:
        """Return the cross-entropy [n,W] of slots, 0 where it is not known.

        Some blocks are computed at a time, and again for the gradients.

        Args:
            base: States [n,W,H] that the backbone's head reads.
            low: States [n,W,R] that the selector's head reads.
            head: The backbone's head [U,H].
            selector: The selector's head [U,R].
        """

        def of(rows: slice) -> Tensor:
            ids, x, y = self.ids[rows], base[rows], low[rows]
            scores = torch.einsum("nwh,nwkh->nwk", x, head[ids]) + torch.einsum("nwr,nwkr->nwk", y, selector[ids])
            place = self.place[rows]
            lost = F.cross_entropy(scores.flatten(0, 1).float(), place.flatten(), reduction="none", ignore_index=-1)
            return lost.view(place.shape)

        cuts = pieces(len(base), self.ids[0].numel() * head.shape[1])
        return torch.cat([checkpoint(of, rows, use_reentrant=False, preserve_rng_state=False) for rows in cuts])
