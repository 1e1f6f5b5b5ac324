"""Draft vocabularies: all of the target's tokens, or a chosen part of them."""

import torch
from torch import Tensor, nn

from specdec.model.archs import ModelConfig


class DraftVocab(nn.Module):
    """Which target tokens a drafter can propose: ids [U] in draft order, or all V of them (`ids` None)."""

    ids: Tensor | None

    def __init__(self, target_size: int, ids: Tensor | None = None):
        """Take distinct target ids [U] in draft order; None: all `target_size` tokens."""
        super().__init__()
        if ids is not None:
            ids = ids.long()
            if ids.ndim != 1 or len(ids) == 0 or ids.min() < 0 or ids.max() >= target_size:
                raise ValueError(f"a draft vocabulary must hold token ids from 0 to {target_size - 1}")
            if len(ids.unique()) != len(ids):
                raise ValueError("a draft vocabulary must not name a token twice")
        self.target_size = target_size
        self.size = target_size if ids is None else len(ids)
        self.register_buffer("ids", ids, persistent=False)

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Draft ids -> target ids, any shape."""
        return draft_ids if self.ids is None else self.ids.take(draft_ids)

    def from_target(self, target_ids: Tensor) -> Tensor:
        """Target ids -> draft ids, any shape; -1 for tokens outside the draft vocabulary."""
        if self.ids is None:
            return target_ids
        place = torch.full((self.target_size,), -1, device=self.ids.device)
        place[self.ids] = torch.arange(self.size, device=self.ids.device)
        return place[target_ids]

    def select(self, logits: Tensor) -> Tensor:
        """Columns of the draft vocabulary: [..., V] -> [..., U]."""
        return logits if self.ids is None else logits.index_select(-1, self.ids)

    def contains(self) -> Tensor:
        """[V] bool: is the target token in the draft vocabulary (EAGLE's t2d)?"""
        if self.ids is None:
            return torch.ones(self.target_size, dtype=torch.bool)
        return torch.zeros(self.target_size, dtype=torch.bool, device=self.ids.device).index_fill(0, self.ids, True)


def most_frequent(counts: Tensor, size: int) -> DraftVocab:
    """The `size` most frequent tokens of counts [V], in ascending order of id as EAGLE-3 stores them."""
    if size >= len(counts):
        return DraftVocab(len(counts))
    return DraftVocab(len(counts), counts.sort(descending=True, stable=True).indices[:size].sort().values)


def fitting_size(config: ModelConfig) -> int:
    """Return the size of draft vocabulary whose head costs as much as the rest of an EAGLE-3 drafter, at most 32,000.

    A token costs `hidden` products in the head. The rest costs 7 hidden^2 (`fc` of three taps, attention of two inputs)
    and 3 hidden x intermediate (MLP).
    """
    rest = 7 * config.hidden + 3 * config.intermediate
    return min(max(rest // 1024, 1) * 1024, 32000)
