"""The policy `table`: draft length by the number of rows."""

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence

from typing_extensions import override

from specdec.engine.adaptive import Policy
from specdec.tuning.costs import Costs, Kind
from specdec.tuning.policy import Rates


class Table(Policy):
    """The number of levels by number of rows, as vLLM's `num_speculative_tokens_per_batch_size`."""

    name = "table"

    def __init__(self, levels: Mapping[int, int]):
        """levels: from this number of rows on, this many. The smallest number also applies to fewer rows."""
        self.starts = sorted(levels)
        self.depths = [levels[start] for start in self.starts]

    @classmethod
    def parse(cls, text: str, deepest: int) -> "Table":
        """Return the table of a text such as 1=5,8=3,32=0.

        Raises ValueError for anything else, and for more levels than the tree has.
        """
        if not re.fullmatch(r"\d+=\d+(,\d+=\d+)*", text):
            raise ValueError(f"a table of draft lengths is written ROWS=LEVELS,..., such as 1=5,8=3,32=0, not {text!r}")
        levels = {int(rows): int(depth) for rows, depth in (part.split("=") for part in text.split(","))}
        if max(levels.values()) > deepest:
            raise ValueError(f"the table asks for {max(levels.values())} levels, and the tree has {deepest}")
        return cls(levels)

    @classmethod
    def measured(cls, costs: Costs, kinds: Sequence[Kind], prior: Sequence[float]) -> "Table":
        """Return the table of the fastest levels by measured costs. kinds, prior: as for `Bandit`."""
        tokens = Rates(prior).tokens()

        def best(rows: int) -> int:
            return max(costs.choices, key=lambda depth: tokens[depth] / costs.seconds(kinds[depth], rows))

        return cls({rows: best(rows) for rows in costs.rows})

    @override
    def plan(self, rows: int) -> int:
        return self.depths[max(bisect_right(self.starts, rows) - 1, 0)]

    def __str__(self) -> str:
        """Return the text that `parse` reads."""
        return ",".join(f"{rows}={depth}" for rows, depth in zip(self.starts, self.depths, strict=True))
