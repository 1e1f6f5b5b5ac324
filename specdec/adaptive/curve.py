"""What a round costs, by the number of rows, of drafted levels and of verified nodes, and what is spent around it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

CHANGING = 16  # rounds behind a change of levels that tell of these; those behind them tell of the machine
# Rounds of a kind over which its excess is averaged in the end. Rounds that follow each other are fast or slow
# together, by a tenth on a shared machine: so eight of them tell little more than one, and many tries are averaged.
KEPT = 256
# What is known of a kind gets old while others are learnt: of the rounds that it counts, a round of another kind takes
# this share. Else a few rounds now and then could not change what many in a worse moment have said.
OLD = 1 / 512
DRIFT = 1 / 16  # weight of a round in the machine's speed, which changes sooner than the excess of a kind
LIKE = 32  # rounds of a number of levels that those of all others count for
MOST = 1.5  # a served round counts no more than so many times what was expected: something else was in its way
LEAST = 0.1  # share of its measured seconds that a round takes at least


@dataclass
class Curve:
    """Seconds of rounds: those of the target's forward over so many nodes of each row, and those of all else.

    Between the measured numbers of rows and of nodes it is linear, and beyond the largest it goes on in the last
    slope. A plain round has no levels and one node.

    Rounds that are served take longer: something is done between them, and while they run others want the same
    processor. Nor do they follow each other as they did when they were measured. So of every number of levels it is
    learnt what its rounds take beyond the measured seconds, and, of all rounds together, how fast the machine is
    lately: served seconds are speed x (measured + excess). The two are told apart by when they are learnt. Behind a
    change of levels the machine is what it was a moment ago, so what is new is the levels' excess; while they stay,
    what is new is the machine's speed. So kinds are compared by rounds that were near each other in time."""

    rows: Sequence[int]  # the measured numbers of rows, ascending
    rest: Mapping[int, Sequence[float]]  # by rows: for 0, 1, ... D levels all that is not the target's forward
    verify: Mapping[int, Mapping[int, float]]  # by rows and nodes: the target's forward and the rule
    only: Sequence[int] | None = None  # numbers of levels that may be chosen; None: all
    padded: bool = False  # a round of fewer rows is one of the next number of rows that was measured
    # By measured rows [D+1]: the excess of each number of levels, nan for those that were never served; and how many
    # rounds it counts for.
    excess: dict[int, list[float]] = field(default_factory=dict)
    served: dict[int, list[float]] = field(default_factory=dict)
    speed: float = 1.0
    lately: tuple[int, int] = -1, 0  # levels, and the rounds since they have changed
    _known: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict, repr=False)
    _lately: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict, repr=False)  # until more is learnt

    @property
    def levels(self) -> int:
        return len(self.rest[self.rows[0]]) - 1

    @property
    def choices(self) -> list[int]:
        """The numbers of levels that may be chosen, ascending."""
        return [*range(self.levels + 1)] if self.only is None else [*self.only]

    def fastest(self, speed: np.ndarray) -> int:
        """The number of levels that may be chosen of the largest speed [D+1]."""
        return max(self.choices, key=speed.__getitem__)

    @property
    def nodes(self) -> int:
        return max(self.verify[self.rows[0]])

    def at(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """For so many rows: rest [D+1] by levels, and verify [N+1] by nodes, of which entry 0 is void."""
        if not self.excess:
            return self._measured(rows)
        if rows not in self._lately:
            rest, verify = self._measured(rows)
            excess = np.maximum(self._excess(rows), (LEAST - 1) * (rest + verify[1]))
            self._lately[rows] = self.speed * (rest + excess), self.speed * verify
        return self._lately[rows]

    def _measured(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """What `at` returns before anything was served: the engine's own seconds."""
        rows = self._played(rows)
        if rows not in self._known:
            rest = _between(self.rows, [np.asarray(self.rest[b]) for b in self.rows], rows)
            of_nodes = [[_between(*zip(*sorted(self.verify[b].items()), strict=True), n)
                         for n in range(self.nodes + 1)] for b in self.rows]  # fmt: skip
            self._known[rows] = rest, _between(self.rows, [np.asarray(v) for v in of_nodes], rows)
        return self._known[rows]

    def took(self, rows: int, levels: int, nodes: int, seconds: float, rounds: int = 1) -> None:
        """Learn how long rounds of this kind took where they were served, with all that was done around them: the mean
        of so many."""
        self._lately.clear()
        knot = self._knot(rows, self.rows)
        if knot not in self.excess:
            self.excess[knot], self.served[knot] = [math.nan] * (self.levels + 1), [0.0] * (self.levels + 1)
        excess, served = self.excess[knot], self.served[knot]
        rest, verify = self._measured(rows)
        own = float(rest[levels] + verify[nodes])
        found, old = max(seconds / self.speed, LEAST * own), excess[levels]
        if math.isnan(old):
            old = found - own
        found = min(found, MOST * (own + old))
        since = self.lately[1] if levels == self.lately[0] else 0
        self.lately = levels, since + rounds
        if since >= CHANGING and served[levels]:
            self.speed *= 1 + (1 - (1 - DRIFT) ** rounds) * (found / (own + old) - 1)
            return
        served[:] = [count * (1 - OLD) ** rounds for count in served]
        served[levels] = min(served[levels] + rounds, max(KEPT, rounds))
        excess[levels] = old + (found - own - old) * rounds / served[levels]

    def forget(self, rows: int, levels: int) -> None:
        """Of what was learnt, what rounds of so many rows and levels take beyond the measured seconds."""
        self._lately.clear()
        knot = self._knot(rows, self.rows)
        if knot in self.excess:
            self.excess[knot][levels], self.served[knot][levels] = math.nan, 0.0

    def drafts_served(self, rows: int) -> bool:
        """Whether it was learnt what rounds that draft take with about so many rows."""
        return any(self.served.get(self._knot(rows, self.rows), ())[1:])

    def _knot(self, rows: int, among: Iterable[int]) -> int:
        """The nearest number of rows."""
        rows = self._played(rows)
        return rows if rows in among else min(among, key=lambda known: abs(known - rows))

    def _played(self, rows: int) -> int:
        """The rows of a round in which so many decode."""
        return next((known for known in self.rows if known >= rows), self.rows[-1]) if self.padded else rows

    def _excess(self, rows: int) -> np.ndarray:
        """[D+1] With about so many rows. As a share of the measured seconds, what all drafts take counts as LIKE rounds
        of each: else one that was tried in a bad moment would seem slow for good."""
        knot = self._knot(rows, self.excess)
        rest, verify = self._measured(knot)
        own, count = rest + verify[1], np.asarray(self.served[knot])
        share = np.where(count > 0, self.excess[knot], 0.0) / own
        drafts = count[1:].sum()
        every = count[1:] @ share[1:] / drafts if drafts else share[0]
        found = (count * share + LIKE * every) / (count + LIKE)
        found[0] = share[0] if count[0] else every
        return found * own

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
        rows = {str(b): values for b, values in of.items()}
        return {"only": self.only, "padded": self.padded, "rows": rows}

    @classmethod
    def of(cls, entries: Mapping) -> "Curve":
        """The inverse of `entries`."""
        rows = {int(b): values for b, values in entries["rows"].items()}
        verify = {b: {int(n): s for n, s in values["verify"].items()} for b, values in rows.items()}
        settings = {name: entries[name] for name in ("only", "padded") if name in entries}
        return cls(
            sorted(rows),
            {b: values["rest"] for b, values in rows.items()},
            verify,
            **settings,
        )


def _between(knots: Sequence[int], values: Sequence, x: float):
    """Linear between the knots; before the first its value, behind the last in the last slope."""
    if x <= knots[0] or len(knots) == 1:
        return values[0]
    right = next((i for i, knot in enumerate(knots) if knot >= x), len(knots) - 1)
    share = (x - knots[right - 1]) / (knots[right] - knots[right - 1])
    return values[right - 1] + share * (values[right] - values[right - 1])
