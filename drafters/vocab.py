"""Draft vocabularies: all of the target's tokens, or a chosen part of them."""

from torch import Tensor

from specdec.model.archs import ModelConfig
from specdec.structs import DraftVocab


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
