"""What a round costs, by the number of rows, of drafted levels and of verified nodes, and what is spent around it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

SHARE = 0.05  # of a round in the average of what is spent around rounds


@dataclass
class Curve:
    """Seconds of rounds: those of the target's forward over so many nodes of each row, and those of all else.

    Between the measured numbers of rows and of nodes it is linear, and beyond the largest it goes on in the last
    slope. A plain round has no levels and one node. What a server does between rounds, and what the engine loses to it
    meanwhile, is the same for every tree, and is counted to `rest` as soon as it is known."""

    rows: Sequence[int]  # the measured numbers of rows, ascending
    rest: Mapping[int, Sequence[float]]  # by rows: for 0, 1, ... D levels all that is not the target's forward
    verify: Mapping[int, Mapping[int, float]]  # by rows and nodes: the target's forward and the rule
    simulated: bool = False  # by formulas, and not by measurement
    around: dict[int, float] = field(default_factory=dict)  # by rows: seconds beside those of the round, lately
    _known: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict, repr=False)

    @property
    def levels(self) -> int:
        return len(self.rest[self.rows[0]]) - 1

    @property
    def nodes(self) -> int:
        return max(self.verify[self.rows[0]])

    def at(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """For so many rows: rest [D+1] by levels, and verify [N+1] by nodes, of which entry 0 is void."""
        if rows not in self._known:
            rest = _between(self.rows, [np.asarray(self.rest[b]) for b in self.rows], rows)
            of_nodes = [[_between(*zip(*sorted(self.verify[b].items()), strict=True), n)
                         for n in range(self.nodes + 1)] for b in self.rows]  # fmt: skip
            self._known[rows] = rest, _between(self.rows, [np.asarray(v) for v in of_nodes], rows)
        rest, verify = self._known[rows]
        return (rest + self._around(rows), verify) if self.around else (rest, verify)

    def took(self, rows: int, levels: int, nodes: int, seconds: float) -> None:
        """Learn what is spent around a round of this kind, of which one took so many seconds with all that."""
        known = self._around(rows)
        self.around[rows] = max(known + SHARE * (seconds - self.seconds(rows, levels, nodes)), 0.0)

    def _around(self, rows: int) -> float:
        """That of so many rows, or of the nearest number that is known."""
        return self.around[min(self.around, key=lambda known: abs(known - rows))] if self.around else 0.0

    def seconds(self, rows: int, levels: int, nodes: int) -> float:
        """A round of `rows` rows that drafts so many levels and verifies so many nodes of each row."""
        rest, verify = self.at(rows)
        return float(rest[levels] + verify[nodes])

    def plain(self, rows: int) -> float:
        return self.seconds(rows, 0, 1)

    def entries(self) -> dict:
        """As JSON has it."""
        of = {b: {"rest": list(self.rest[b]), "verify": {str(n): s for n, s in self.verify[b].items()}}
              for b in self.rows}  # fmt: skip
        return {"simulated": self.simulated, "rows": {str(b): values for b, values in of.items()}}

    @classmethod
    def of(cls, entries: Mapping) -> "Curve":
        """The inverse of `entries`."""
        rows = {int(b): values for b, values in entries["rows"].items()}
        verify = {b: {int(n): s for n, s in values["verify"].items()} for b, values in rows.items()}
        return cls(sorted(rows), {b: values["rest"] for b, values in rows.items()}, verify, entries["simulated"])


def _between(knots: Sequence[int], values: Sequence, x: float):
    """Linear between the knots; before the first its value, behind the last in the last slope."""
    if x <= knots[0] or len(knots) == 1:
        return values[0]
    right = next((i for i, knot in enumerate(knots) if knot >= x), len(knots) - 1)
    share = (x - knots[right - 1]) / (knots[right] - knots[right - 1])
    return values[right - 1] + share * (values[right] - values[right - 1])
