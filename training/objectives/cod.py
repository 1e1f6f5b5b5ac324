"""Which rows of parallel blocks are trained on: conditional drop (COD; PARD, arXiv 2504.18583, and P-EAGLE).

A row has an anchor, the position p of the last real token before it, and a depth d, the number of mask tokens up to
itself. The target predicts its token at column p + d. Depth 0 is the real row itself, and all of those are drawn. Of
depth d a share `share` ** d is drawn, `least_share` at least, of the rows that follow one drawn at depth d - 1.
So a chain is always drawn from its beginning.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.model.attention import document_positions

POOLS = ("learnt", "all")


def sample(
    learnt: Tensor, depths: int, share: float, least_share: float, anchors: int | None = None, pool: str = "learnt"
) -> Tensor:
    """[B,T,depths] bool, at [b,c,d]: whether the row of depth d that ends at column c is drawn.

    learnt [B,T] bool: columns at which the target's prediction is learnt. pool: 'learnt', chains go through learnt
    columns, whose number n gives (n - d) share^d rows of depth d (speculators); 'all', through any, T share^d rows
    (PARD). anchors: chains begin in so many learnt columns at most. While gradients are off, as in evaluation, the draw
    is the same every time.
    """
    generator = None if torch.is_grad_enabled() else torch.Generator(learnt.device).manual_seed(0)

    def some(candidates: Tensor, count: Tensor) -> Tensor:
        """`count` [B] of the candidates [B,T], or all if there are fewer."""
        lots = torch.rand(candidates.shape, device=candidates.device, generator=generator)
        places = lots.masked_fill(~candidates, 2).argsort(1).argsort(1)
        return candidates & (places < count[:, None])

    through = learnt if pool == "learnt" else torch.ones_like(learnt)
    now = through if anchors is None else some(through, torch.full_like(learnt[:, 0], anchors, dtype=torch.int64))
    total, drawn = now.sum(1), [learnt]
    for depth in range(1, depths):
        size = total - depth if pool == "learnt" else total
        now = some(now, (size.clamp(min=0).double() * max(share**depth, least_share)).long())
        drawn.append(now & learnt)
        now = F.pad(now[:, :-1], (1, 0), value=False) & through
    return torch.stack(drawn, 2)


def by_anchor(drawn: Tensor, documents: Tensor, earliest: int) -> Tensor:
    """Return the drawn rows by their anchor, bool [B,T+1,depths], where [b,p+1,d] is the row of anchor p.

    The anchor p of a chain with nothing before it is -1. Rows that leave the anchor's document [B,T] are left out, and
    so are those of anchors before place `earliest` of their document.
    """
    b, t, depths = drawn.shape
    anchors = torch.arange(-1, t, device=documents.device).clamp(min=0)
    may = F.pad(document_positions(documents) >= earliest, (1, 0), value=earliest < 0)
    out = torch.zeros(b, t + 1, depths, dtype=torch.bool, device=drawn.device)
    for depth in range(min(depths, t + 1)):
        columns = slice(max(depth - 1, 0), t)
        begin = 1 if depth == 0 else 0
        rows = slice(begin, begin + t - columns.start)
        same = documents[:, anchors[rows]] == documents[:, columns]
        out[:, rows, depth] = drawn[:, columns, depth] & same & may[:, rows]
    return out
