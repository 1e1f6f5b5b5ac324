"""Tree algebra that policies, verifiers and drawings share."""

import torch
from torch import Tensor


def ancestors_of(parents: Tensor, depth: int) -> Tensor:
    """Return the ancestors bool [B,N,N] of each node, itself included, from parents [B,N]; the root is its own parent.

    No node may be deeper than `depth`. Pointer doubling: after k squarings every path of up to 2^k edges is closed.
    """
    n = parents.shape[1]
    reach = torch.eye(n, device=parents.device).expand(len(parents), n, n).scatter(2, parents[..., None], 1.0)
    for _ in range(max(depth - 1, 0).bit_length()):
        reach = (reach @ reach).clamp_(max=1.0)
    return reach > 0
