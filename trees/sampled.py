"""A tree whose children can be drawn from the drafter's distribution, without replacement."""

import re
from dataclasses import dataclass
from itertools import accumulate, product
from operator import mul

from typing_extensions import override

from specdec.recording import Accepted, Recording
from specdec.trees.base import Tree, check_size
from specdec.trees.static import FixedTree


@dataclass(frozen=True)
class SampledTree(FixedTree):
    """Draw the children of each node from the drafter, as many as `expansion` gives for the level.

    This is SpecInfer's expansion configuration (arXiv 2305.09781). (1, 1, 1) is a chain; (3, 1, 1) are three chains
    with different first tokens. The text is drawn 3,1,1.

    The shape never depends on what was drawn: to keep the best draws would change the distribution that the verifier
    assumes. At temperature 0 the children are the most likely tokens.
    """

    expansion: tuple[int, ...] = (3, 1, 1, 1, 1)

    samples = True

    def __post_init__(self) -> None:
        """Check `expansion`, a number of children of at least 1 for each level, and compute the shape."""
        expansion = tuple(self.expansion)
        if not expansion or min(expansion) < 1:
            raise ValueError(f"expansion must give at least one child on each of one or more levels, got {expansion}")
        vars(self)["expansion"] = expansion
        steps, nodes = len(expansion), sum(accumulate(expansion, mul, initial=1))
        check_size(max(expansion), steps, nodes)
        ranks = [range(count) for count in expansion]
        self._shape([path for d in range(1, steps + 1) for path in product(*ranks[:d])], expansion)

    @classmethod
    @override
    def parse(cls, text: str) -> "SampledTree | None":
        found = re.fullmatch(r"drawn (\d+(,\d+)*)", text)
        return found and cls(tuple(map(int, found[1].split(","))))

    @property
    @override
    def text(self) -> str:
        return "drawn " + ",".join(map(str, self.expansion))

    @override
    def shallower(self, steps: int) -> "SampledTree":
        return SampledTree(self.expansion[:steps])

    @override
    def replay(self, recording: Recording) -> Accepted:
        return Tree.replay(self, recording)  # what was drawn is not the text
