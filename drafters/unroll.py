"""Attention of a draft layer that is unrolled for training."""

from collections.abc import Callable
from copy import copy

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


class Rows:
    """Some rows of a batch, as a batch of one long row."""

    def __init__(self, chosen: Tensor) -> None:
        """Select the rows that are set in `chosen`, bool [B,T]."""
        self.shape, self.at = chosen.shape, chosen.flatten().nonzero()[:, 0]

    def of(self, x: Tensor) -> Tensor:
        """Return the selected rows [1,n,...] of x [B,T,...]."""
        return x.flatten(0, 1).index_select(0, self.at)[None]

    def spread(self, x: Tensor) -> Tensor:
        """[1,n,...] -> [B,T,...], 0 where no row is."""
        whole = x.new_zeros(self.shape.numel(), *x.shape[2:])
        return whole.index_copy(0, self.at, x[0]).unflatten(0, self.shape)


class UnrolledAttention:
    """Attend in the unrolled layer over the keys of the first call, and over each later call's own row.

    `seen` [B,T,T] selects the keys of the first call. It is causal, so keys after a block of queries are skipped. Later
    calls may have only the rows `some`.
    """

    BLOCK = 128  # queries

    def __init__(self, seen: Tensor, some: Rows | None = None) -> None:
        """Take the mask `seen`, bool [B,T,T], and the rows of later calls; None: all rows."""
        bias = torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, -torch.inf)
        self.some = some
        self.bias = bias[:, None, None]  # added: unlike masked_fill, that costs the backward pass nothing
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention output of one call, and keep its keys and values for later calls."""
        if self.some is None or not self.keys:
            return self._call(q, k, v)
        return self.some.of(self._call(*map(self.some.spread, (q, k, v))))

    def _call(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.keys.append(k)
        self.values.append(v)
        b, t, heads, dim = q.shape
        q = q.view(b, t, k.shape[2], heads // k.shape[2], dim) * dim**-0.5
        own = None
        if len(self.keys) > 1:  # [B,T,j,K,Dh] of the later calls
            own = torch.stack(self.keys[1:], dim=2), torch.stack(self.values[1:], dim=2)
        blocks = [slice(start, min(start + self.BLOCK, t)) for start in range(0, t, self.BLOCK)]
        out = [self._attend(q[:, rows], rows, own and (own[0][:, rows], own[1][:, rows])) for rows in blocks]
        return torch.cat(out, dim=1).reshape(b, t, heads * dim)

    def _attend(self, q: Tensor, rows: slice, own: tuple[Tensor, Tensor] | None) -> Tensor:
        """Return the output [B,n,K,G,Dh] of queries q of these rows, with own keys and values [B,n,j,K,Dh]."""
        end = rows.stop
        keys, values = self.keys[0][:, :end], self.values[0][:, :end]
        scores = torch.einsum("bnkgd,bskd->bkgns", q, keys).float() + self.bias[..., rows, :end]
        if own is None:
            return torch.einsum("bkgns,bskd->bnkgd", scores.softmax(-1).to(values.dtype), values)
        later = torch.einsum("bnkgd,bnjkd->bkgnj", q, own[0]).float()
        weights = torch.cat([scores, later], dim=-1).softmax(-1).to(values.dtype)
        first, later = weights.split([end, later.shape[-1]], dim=-1)
        out = torch.einsum("bkgns,bskd->bnkgd", first, values)
        return out + torch.einsum("bkgnj,bnjkd->bnkgd", later, own[1])


def recomputed(
    layer: Callable, embeds: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor], attend: UnrolledAttention, index: int
) -> Tensor:
    """`layer` whose activations are recomputed in the backward pass, but for its own key and value."""

    def run(embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        again = copy(earlier)  # this runs twice, and must leave no trace
        again.keys, again.values = [*earlier.keys], [*earlier.values]
        out = layer(embeds, hidden, rope, again, index)
        return out, again.keys[-1], again.values[-1]

    earlier = copy(attend)
    earlier.keys, earlier.values = [*attend.keys], [*attend.values]
    out, key, value = checkpoint(run, embeds, hidden, use_reentrant=False, preserve_rng_state=False)
    attend.keys.append(key)
    attend.values.append(value)
    return out
