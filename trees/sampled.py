"""A tree whose children can be drawn from the drafter's distribution, without replacement."""

from collections.abc import Sequence
from itertools import accumulate, product
from operator import mul

from specdec.trees.bounds import check_size
from specdec.trees.static import FixedTree


class SampledTree(FixedTree):
    """`expansion` says how many children each node draws, level by level: SpecInfer's expansion configuration (arXiv
    2305.09781). (1, 1, 1) is a chain; (3, 1, 1) are three chains from different first tokens.

    The shape never depends on what was drawn: to keep the best of the draws would change the distribution that a
    verifier takes them to come from. At temperature 0 the children are the most likely tokens.
    """

    samples = True

    def __init__(self, expansion: Sequence[int] = (3, 1, 1, 1, 1)):
        self.expansion = tuple(expansion)
        if not self.expansion or min(self.expansion) < 1:
            raise ValueError(f"expansion must give at least one child on each of one or more levels, got {expansion}")
        steps, nodes = len(self.expansion), sum(accumulate(self.expansion, mul, initial=1))
        check_size(max(self.expansion), steps, nodes)
        ranks = [range(count) for count in self.expansion]
        super().__init__([path for d in range(1, steps + 1) for path in product(*ranks[:d])], self.expansion)

    def shallower(self, steps: int) -> "SampledTree":
        return SampledTree(self.expansion[:steps])
