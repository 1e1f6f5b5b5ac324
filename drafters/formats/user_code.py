"""A drafter that the user's own code makes anew: FILE.py:NAME, or an entry point (`specdec.own`)."""

from pathlib import Path

import torch

from specdec import own
from specdec.contracts import Drafter


def from_code(path: str, target) -> Drafter | None:
    """The drafter that the user's own code makes anew; None for a checkpoint."""
    code, checkpoint = own.split(path)
    fresh = checkpoint is None if own.is_own(path) else path.isidentifier() and not Path(path).exists()
    part = own.find("drafter", code) if fresh else None
    if part is None:
        return None
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        drafter = own.make(code, part, Drafter, target)
    drafter.conventions = {"family": f"made by {code}"}
    return drafter.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
