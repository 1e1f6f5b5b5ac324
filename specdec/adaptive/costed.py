"""Policies that go by what rounds cost: when they try what they know little of, and when they change their mind."""

from dataclasses import dataclass

import numpy as np

from specdec.adaptive.curve import Curve
from specdec.adaptive.policy import Outcome, Policy

PATIENCE = 8  # plain rounds after which drafting begins again, if it would have been faster in all of them
# The first rounds after a change between plain rounds and drafts take longer: a drafter absorbs what it has missed, and
# weights that were not read lately have left the processor's cache.
SETTLING = 2
# Where drafts pay, a few of so many rounds are plain, from the eighth on: else nobody knows what plain rounds take.
FIRST_PLAIN, PLAIN, FEW_PLAIN = 8, 128, 4
# Now and then a round drafts as deep as can be, as nothing else tells what deep drafts are worth. After plain rounds a
# drafter has much to absorb: so there a few rounds do, and each time that plain rounds go on the next such are twice as
# far, up to the last number.
DEEP, AFTER_PLAIN, FEW, SELDOM = 128, 1024, 5, 16384
THINK = 8  # one of so many rounds thinks it over: to do so takes a twentieth of the time of a small target's round
GAIN = 1.03  # drafts that are expected to be faster than plain rounds by less than this are not worth a change of mind
STAY = 1.02  # another depth is taken only if it is expected to be faster than this
LATELY = 256  # sequences that are counted in full; then all counts are halved


@dataclass
class Prompts:
    """What it costs that the drafter absorbs prompts, which only those have to pay for who draft."""

    seconds: float = 0.0  # that prompts took
    absorbed: float = 0.0  # sequences that they belong to
    joined: float = 0.0  # sequences, with those whose prompts are held
    tokens: float = 0.0  # that all of these have emitted
    running: int = 0

    def add(self, rows: int, seconds: float | None) -> None:
        self.joined += rows
        if seconds is not None:
            self.seconds, self.absorbed = self.seconds + seconds, self.absorbed + rows
        if self.joined > LATELY:
            self.joined, self.tokens = self.joined / 2, self.tokens / 2
            self.seconds, self.absorbed = self.seconds / 2, self.absorbed / 2

    def emitted(self, rows: int, tokens: int) -> None:
        """By a round with so many rows."""
        self.running, self.tokens = rows, self.tokens + tokens

    def price(self) -> float:
        """Seconds for each token. A sequence that runs has more tokens to come, so it does not count as one."""
        if not (self.absorbed and self.tokens):
            return 0.0
        return self.seconds / self.absorbed * max(self.joined - self.running, 1.0) / self.tokens


class Costed(Policy):
    """A policy that goes by what rounds cost."""

    curve: Curve | None
    rounds = 0  # that were planned
    asked, best = 0, 0  # the number of rows that was asked about last, and what was best for them
    now: int | None = None  # levels that rounds draft lately
    waiting = 0  # plain rounds since a draft would have been faster
    plain, every = 0, AFTER_PLAIN  # plain rounds since drafts were tried, and how many there are between two such tries
    last: tuple[int, int, int] | None = None  # rows, levels and nodes of the last round, if its time tells something
    drafting, alike = False, 0  # whether that round drafted, and how many did or did not since it was otherwise
    timed = False  # a server tells how long rounds take, and the choice goes by that

    def __init__(self):
        self.prompts = Prompts()

    def plan(self, rows: int) -> int:
        self.rounds += 1
        if self._begins() or self._tries():
            return self._deepest(rows)
        if rows != self.asked or self.rounds % THINK == 0:
            self.asked, self.best = rows, self._best(rows)
        levels = self._settle(self.best)
        return 0 if self.timed and (self.rounds - FIRST_PLAIN) % PLAIN < FEW_PLAIN else levels

    def _best(self, rows: int) -> int:
        """How many levels to draft for so many rows, by what is known."""
        raise NotImplementedError

    def _deepest(self, rows: int) -> int:
        """How many levels to draft in rounds that are to tell something."""
        raise NotImplementedError

    def _begins(self) -> bool:
        """So little is known that a round is to tell something."""
        return False

    def _tries(self) -> bool:
        """It is this round's turn to tell something."""
        if self.now:
            return self.rounds % DEEP == 0
        if self.plain == self.every:
            self.every = min(2 * self.every, SELDOM)
            self.plain = -FEW
        self.plain += 1
        return self.plain <= 0

    def _settle(self, levels: int) -> int:
        """Go on with so many levels. After plain rounds a drafter has much to absorb: so drafting begins again when it
        would have been faster for a while."""
        self.waiting = self.waiting + 1 if levels and self.now == 0 else 0
        if not self.waiting or self.waiting > PATIENCE:
            self.now = levels
        if self.now:
            self.plain, self.every = 0, AFTER_PLAIN
        return self.now

    def _fastest(self, rows: int, speed: np.ndarray) -> int:
        """The number of levels with the most tokens a second: that of late, unless another is clearly better. speed
        [D+1]: of a row by levels, without what prompts take."""
        if self.timed:
            plain, speed = speed[0], speed / (1 + rows * self.prompts.price() * speed)
            speed[0] = GAIN * plain
        best = int(speed.argmax())
        return self.now if self.now is not None and speed[best] < STAY * speed[self.now] else best

    def joined(self, rows: int, seconds: float | None) -> None:
        self.prompts.add(rows, seconds)

    def learn(self, outcome: Outcome) -> None:
        self.prompts.emitted(len(outcome.accepted), len(outcome.accepted) + sum(outcome.accepted))
        drafting = outcome.levels > 0
        self.alike = self.alike + 1 if drafting == self.drafting else 1
        self.drafting = drafting
        settled = self.alike > SETTLING
        self.last = (len(outcome.accepted), outcome.levels, outcome.nodes) if settled else None

    def took(self, seconds: float) -> None:
        last, self.last = self.last, None
        if self.curve is None:
            return
        self.timed = True
        if last is not None:
            self.curve.took(*last, seconds)
