"""The keys and values of an accepted path move down in place, in all layers at once (formula: `cuda/commit.py`)."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec.ops import kernel_for, native

Commit = Callable[[Tensor, Tensor, Tensor], None]  # of lens [B], path [B,P] and n [B]


def commit(memory: Sequence[Tensor]) -> Commit:
    """Return the function that moves slots in the first B rows of layers [2,R,S,K,Dh]. There may be no layers."""
    if not memory:
        return lambda lens, path, n: None
    like = memory[0]
    if kernel := kernel_for("commit", like):
        addresses = torch.tensor([kv.data_ptr() for kv in memory], device=like.device)
        return lambda lens, path, n: kernel(addresses, like, lens, path, n)
    if like.device.type == "cpu" and native.has_rows():
        own = native.operator("commit")
        return lambda lens, path, n: own(memory, lens, path, n)
    return reference(memory)


def reference(memory: Sequence[Tensor]) -> Commit:
    """Return `commit` in torch's operators. Slots after the end of a path are moved too, which has no effect."""
    _, rows, slots = memory[0].shape[:3]
    flat = [kv.view(2, rows * slots, -1) for kv in memory]
    places = torch.arange(slots, device=memory[0].device)
    starts = torch.arange(rows, device=places.device) * slots

    def move(lens: Tensor, path: Tensor, n: Tensor) -> None:
        if path.shape[1] > 1:
            first = (starts[: len(path)] + lens)[:, None]
            source, place = (first + path[:, 1:]).flatten(), (first + places[1 : path.shape[1]]).flatten()
            for both in flat:
                both.index_copy_(1, place, both.index_select(1, source))

    return move


@native.seen_as("specdec_rows.commit.default")
def _seen(memory: Sequence[Tensor], lens: Tensor, path: Tensor, n: Tensor) -> None:
    reference(memory)(lens, path, n)
