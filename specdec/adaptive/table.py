"""The policy `table`: draft length by the number of rows."""

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence

import numpy as np

from specdec.adaptive.costed import Costed
from specdec.adaptive.curve import Curve
from specdec.adaptive.policy import Outcome
from specdec.adaptive.rates import Rates


class Table(Costed):
    """So many levels from so many rows on, as vLLM's `num_speculative_tokens_per_batch_size`."""

    name = "table"
    tries_deep = False

    def __init__(self, levels: Mapping[int, int]):
        """levels: from this number of rows on, this many. The smallest number also stands for fewer rows."""
        super().__init__()
        self.starts = sorted(levels)
        self.depths = [levels[start] for start in self.starts]
        self.curve: Curve | None = None  # by which a measured table is made anew when more is known of costs

    @classmethod
    def parse(cls, text: str, deepest: int) -> "Table":
        """The table of a text such as 1=5,8=3,32=0. ValueError, one sentence, for anything else, and for more levels
        than the tree has."""
        if not re.fullmatch(r"\d+=\d+(,\d+=\d+)*", text):
            raise ValueError(f"a table of draft lengths is written ROWS=LEVELS,..., such as 1=5,8=3,32=0, not {text!r}")
        levels = {int(rows): int(depth) for rows, depth in (part.split("=") for part in text.split(","))}
        if max(levels.values()) > deepest:
            raise ValueError(f"the table asks for {max(levels.values())} levels, and the tree has {deepest}")
        return cls(levels)

    @classmethod
    def measured(cls, curve: Curve, sizes: Sequence[int], prior: Sequence[float]) -> "Table":
        """The table of what is fastest by measured costs. sizes [D+1]: nodes of the trees of 0 to D levels. prior [D]:
        as for `Rates`."""
        found = cls(dict.fromkeys(curve.rows, 0))
        found.curve, found.sizes, found.rates = curve, np.asarray(sizes), Rates(prior)
        found.depths = [curve.fastest(found.rates.speed(curve, found.sizes, rows)) for rows in found.starts]
        return found

    def _best(self, rows: int) -> int:
        at = max(bisect_right(self.starts, rows) - 1, 0)
        if self.timed:
            self.depths[at] = self._fastest(rows, self.rates.speed(self.curve, self.sizes, rows))
        return self.depths[at]

    def learn(self, outcome: Outcome) -> None:
        """How often drafts are right, where a server tells what rounds take. What is not drafted stays as it was."""
        super().learn(outcome)
        if self.timed and outcome.levels:
            self.rates.add(outcome.accepted, outcome.ended)

    def __str__(self) -> str:
        return ",".join(f"{rows}={depth}" for rows, depth in zip(self.starts, self.depths, strict=True))
