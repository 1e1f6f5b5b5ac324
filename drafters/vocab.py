"""Draft vocabularies: all of the target's tokens, or a chosen part of them."""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.checkpoint import read_pickle


class DraftVocab(nn.Module):
    """Which target tokens a drafter can propose: ids [U] in draft order, or all V of them (`ids` None)."""

    def __init__(self, target_size: int, ids: Tensor | None = None):
        super().__init__()
        if ids is not None:
            if ids.ndim != 1 or len(ids) == 0 or ids.min() < 0 or ids.max() >= target_size:
                raise ValueError(f"a draft vocabulary must hold token ids from 0 to {target_size - 1}")
            if len(ids.unique()) != len(ids):
                raise ValueError("a draft vocabulary must not name a token twice")
            ids = ids.long()
        self.target_size = target_size
        self.size = target_size if ids is None else len(ids)
        self.register_buffer("ids", ids, persistent=False)

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Draft ids -> target ids, any shape."""
        if self.ids is None:
            return draft_ids
        return F.embedding(draft_ids, self.ids[:, None]).squeeze(-1)

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


def read_token_map(path: Path, target_size: int) -> DraftVocab:
    """A list of target ids in a file: FR-Spec's `freq_*.pt` (thunlp/FR-Spec `fr/fr.py`) or JSON, most frequent first.

    The order is kept. A token named twice counts once, for FR-Spec's own script repeats the end-of-sequence token, so
    the number in a file's name need not be the map's size. Raises ValueError for anything but ids of the target.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"no such token map: {path}")
    if path.suffix == ".json":
        try:
            ids = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not valid JSON: {error}") from None
    else:
        ids = read_pickle(path)
    if isinstance(ids, Tensor):
        ids = ids.flatten().tolist()
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise ValueError(f"{path} must hold a list of token ids")
    if min(ids) < 0 or max(ids) >= target_size:
        raise ValueError(f"{path} holds token {max(ids)}, but the target's vocabulary has {target_size} tokens only")
    return DraftVocab(target_size, torch.tensor(list(dict.fromkeys(ids))))
