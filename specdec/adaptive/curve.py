"""What a round costs, by the number of rows, of drafted levels and of verified nodes, and what is spent around it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

MEMORY = 0.995  # share of a served round's weight that is left after the next one
MOST = 3.0  # a served round counts no more than so many times what was expected: something else was in its way
RIDGE = 0.5  # served rounds that the belief counts that they take as long as others, and something more


@dataclass
class Curve:
    """Seconds of rounds: those of the target's forward over so many nodes of each row, and those of all else.

    Between the measured numbers of rows and of nodes it is linear, and beyond the largest it goes on in the last
    slope. A plain round has no levels and one node. Rounds that are served take longer: something is done between them,
    and while they run others want the same processor. So as soon as it is known how long they took, all costs are those
    of the line from the measured seconds to these, by the number of rows."""

    rows: Sequence[int]  # the measured numbers of rows, ascending
    rest: Mapping[int, Sequence[float]]  # by rows: for 0, 1, ... D levels all that is not the target's forward
    verify: Mapping[int, Mapping[int, float]]  # by rows and nodes: the target's forward and the rule
    simulated: bool = False  # by formulas, and not by measurement
    # By rows, of the rounds that were served: sums of 1, x, y, x^2, x y for measured x and served y, lately.
    served: dict[int, np.ndarray] = field(default_factory=dict)
    _known: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict, repr=False)

    @property
    def levels(self) -> int:
        return len(self.rest[self.rows[0]]) - 1

    @property
    def nodes(self) -> int:
        return max(self.verify[self.rows[0]])

    def at(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """For so many rows: rest [D+1] by levels, and verify [N+1] by nodes, of which entry 0 is void."""
        rest, verify = self._measured(rows)
        if not self.served:
            return rest, verify
        slope, more = self._line(rows)
        return slope * rest + more, slope * verify

    def _measured(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """What `at` returns before anything was served: the engine's own seconds."""
        if rows not in self._known:
            rest = _between(self.rows, [np.asarray(self.rest[b]) for b in self.rows], rows)
            of_nodes = [[_between(*zip(*sorted(self.verify[b].items()), strict=True), n)
                         for n in range(self.nodes + 1)] for b in self.rows]  # fmt: skip
            self._known[rows] = rest, _between(self.rows, [np.asarray(v) for v in of_nodes], rows)
        return self._known[rows]

    def took(self, rows: int, levels: int, nodes: int, seconds: float) -> None:
        """Learn how long a round of this kind took where it was served, with all that was done around it."""
        rest, verify = self._measured(rows)
        own = rest[levels] + verify[nodes]
        slope, more = self._line(rows)
        seconds = min(seconds, MOST * (slope * own + more))
        old = self.served.get(rows, np.zeros(5))
        self.served[rows] = MEMORY * old + (1.0, own, seconds, own * own, own * seconds)

    def _line(self, rows: int) -> tuple[float, float]:
        """Slope and intercept of served seconds over measured ones, by ridge regression towards a slope of 1: those of
        so many rows, or of the nearest number that was served."""
        if not self.served:
            return 1.0, 0.0
        n, x, y, xx, xy = self.served[min(self.served, key=lambda known: abs(known - rows))]
        ridge = RIDGE * (x / n) ** 2
        slope = max((xy - x * y / n + ridge) / (xx - x * x / n + ridge), 0.1)
        return slope, max((y - slope * x) / n, 0.0)

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
