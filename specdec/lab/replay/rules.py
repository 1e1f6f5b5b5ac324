"""Rules that cut a dynamic tree at each root, for `DynamicTree.replay`."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.recording import NOWHERE
from specdec.trees.dynamic import Rule


def likely(probability: float) -> Rule:
    """The rule that verifies no node whose path has less than this probability under the drafter."""
    least = _log(probability)

    def rule(levels: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        nodes = 1 + sum((scores >= least).sum(1) for scores in levels)
        return torch.full_like(nodes, len(levels)), nodes

    return rule


def while_likely(probability: float) -> Rule:
    """The rule that drafts no level behind one whose best path has less than this probability under the drafter."""
    least = _log(probability)

    def rule(levels: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        goes_on = [scores.amax(1, keepdim=True) >= least for scores in levels[:-1]]
        deep = 1 + torch.cat([levels[0][:, :0].bool(), *goes_on], 1).long().cumprod(1).sum(1)
        return deep, torch.full_like(deep, NOWHERE)

    return rule


def _log(probability: float) -> float:
    if not 0 < probability <= 1:
        raise ValueError(f"a truncation rule's probability must lie in (0, 1], got {probability}")
    return math.log(probability)
