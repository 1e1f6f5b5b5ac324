"""Policies that go by what rounds cost: when they try what they know little of, and when they change their mind."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specdec.adaptive.curve import Curve
from specdec.adaptive.policy import Outcome, Policy

# Rounds that a choice stands for: to make one takes hundredths of a small target's round. Where rounds are timed it
# also stands for a few rows more or less, as each chat that ends or joins would ask for another.
STRETCH = 16
PATIENCE = 16  # plain rounds after which drafting begins again, if it would have been faster in all of them
# The first rounds after a change between plain rounds and drafts take longer: a drafter absorbs what it has missed, and
# weights that were not read lately have left the processor's cache.
SETTLING = 4
# Where drafts pay, a few of so many rounds are plain, from the eighth on: else nobody knows what plain rounds take.
FIRST_PLAIN, PLAIN, FEW_PLAIN = 8, 128, 8
# Where drafts go on, a few rounds draft one level more, and the next time one less: what such rounds take is known from
# other loads and times only. The first time soon, then after more and more rounds, up to the last number.
NEAR_SOON, NEAR, NEAR_SELDOM = 16, 64, 512
DEEP = 128  # one of so many rounds drafts as deep as can be, as nothing else tells what deep drafts are worth
# Where plain rounds go on, a few rounds draft: after so many plain rounds for each row, then after more and more, up to
# the last number. They draft as deep as seems best, every other time as deep as can be. After plain rounds a drafter
# has much to absorb of every row, which may take as long as thirty of them: so drafts that are tried follow each other,
# and are few. Where rounds are timed the next ones wait until what the last ones cost is this share of the plain ones.
FEW, SOON, SELDOM, SHARE = 10, 128, 16384, 0.005
FEW_DEEP = 4  # deep drafts in such a try: they are to tell what is accepted, and every row of them does
GAIN = 1.03  # drafts that are expected to be faster than plain rounds by less than this are not worth a change of mind
# The same at a load at which no drafts were served yet: longer rounds suffer more from what else a server does.
FIRST_GAIN = 1.1
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


@dataclass
class Tries:
    """When another number of levels is tried, at loads of about as many rows."""

    left: int  # rounds until the next try
    following: int  # and from that to the one behind it
    most: int  # and at most
    soonest: int = 0  # and at least, where it goes by what tries cost
    count: int = 0  # tries so far

    def passed(self, rounds: int) -> bool:
        """So many rounds more were played. Whether another number is tried now."""
        self.left -= rounds
        if self.left > 0:
            return False
        self.left, self.following = self.following, min(2 * self.following, self.most)
        self.count += 1
        return True

    def cost(self, rounds: float) -> None:
        """What the last try led to took as long as so many plain rounds more than plain rounds that give as many tokens
        would have."""
        self.left = min(max(round(rounds / SHARE), self.soonest), self.most)


class Costed(Policy):
    """A policy that goes by what rounds cost."""

    curve: Curve | None
    sizes: Sequence[int]  # [D+1] nodes of the trees of 0, 1, ... D levels
    tries_deep = True  # what drafts are worth is known of those only that were drafted
    rounds = 0  # that were planned
    asked, levels, left = 0, 0, 0  # the rows of the last choice, what was chosen, and for how many rounds it stands yet
    promising = 1  # levels that seemed best among drafts
    now: int | None = None  # levels that rounds draft lately
    waiting: int | None = None  # the plain round since which a draft would have been faster
    plain_due, deep_due = FIRST_PLAIN, DEEP  # rounds from which on plain ones, and deep drafts, are to be tried
    thought = 0  # the round of the last choice
    last: tuple[int, int, int] | None = None  # rows, levels and nodes of the last round, if its time tells something
    drafting, alike = False, 0  # whether that round drafted, and how many did or did not since it was otherwise
    emitted = 0, 0  # its rows, and their tokens
    timed = False  # a server tells how long rounds take, and the choice goes by that
    kind: tuple[int, int, int] | None = None  # of rounds whose seconds have not been learnt yet
    seconds, count = 0.0, 0  # of these

    def __init__(self):
        self.prompts = Prompts()
        self.trial: list[int] = []  # levels of the next rounds, which are to tell something
        # Of drafts where rounds are plain, and of one level more or less where they are not: by `_load`.
        self.tries: dict[int, Tries] = {}
        # Those of the last try, and the seconds that drafts since then have taken longer than plain rounds would have.
        self.tried: Tries | None = None
        self.spent = 0.0
        self.near: defaultdict[int, Tries] = defaultdict(lambda: Tries(NEAR_SOON, NEAR, NEAR_SELDOM))

    def plan(self, rows: int) -> int:
        self.rounds += 1
        if self.trial:
            return self.trial.pop()
        if self.left and (rows == self.asked or (self.timed and _load(rows) == _load(self.asked))):
            self.left -= 1
            return self.levels
        if self._begins():
            return self._deepest()
        self.asked, self.left = rows, STRETCH - 1
        self.levels = self._settle(self._best(rows))
        self.trial, self.thought = self._tries(rows), self.rounds
        return self.trial.pop() if self.trial else self.levels

    def _best(self, rows: int) -> int:
        """How many levels to draft for so many rows, by what is known."""
        raise NotImplementedError

    def _deepest(self) -> int:
        """How many levels to draft in rounds that are to tell something."""
        return len(self.sizes) - 1

    def _begins(self) -> bool:
        """So little is known that a round is to tell something."""
        return False

    def _tries(self, rows: int) -> list[int]:
        """Levels of rounds that are due to tell something, before those that were chosen."""
        if self.now:
            if self.timed and self.rounds >= self.plain_due:
                self.plain_due = self.rounds + PLAIN
                return [0] * FEW_PLAIN
            if self.tries_deep and self.rounds >= self.deep_due:
                self.deep_due = self.rounds + DEEP
                return [self._deepest()]
            near = self.near[_load(rows)]
            if self.timed and near.passed(self.rounds - self.thought):
                levels = self.now + (1 if near.count % 2 else -1)
                return [levels] * FEW if levels and levels in self.curve.choices else []
        elif self.timed or self.tries_deep:
            if self.spent and self.tried is not None:
                self.tried.cost(self.spent / self.curve.plain(rows))
            load, self.spent = _load(rows), 0.0
            soon = min(SOON << load, SELDOM)
            tries = self.tries.setdefault(load, Tries(soon, 2 * soon, SELDOM, soon))
            if tries.passed(self.rounds - self.thought):
                self.tried, deep = tries, self.tries_deep and tries.count % 2 == 0
                return [self._deepest()] * FEW_DEEP if deep else [self.promising] * FEW
        return []

    def _settle(self, levels: int) -> int:
        """Go on with so many levels. After plain rounds a drafter has much to absorb: so drafting begins again when it
        would have been faster for a while."""
        if not levels or self.now != 0:
            self.waiting = None
        elif self.waiting is None:
            self.waiting = self.rounds
        if self.waiting is None or self.rounds - self.waiting >= PATIENCE:
            self.now = levels
        return self.now

    def _fastest(self, rows: int, speed: np.ndarray) -> int:
        """The number of levels with the most tokens a second: that of late, unless another is clearly better. speed
        [D+1]: of a row by levels, without what prompts take."""
        if self.timed:
            plain, speed = speed[0], speed / (1 + rows * self.prompts.price() * speed)
            speed[0] = (GAIN if self.curve.drafts_served(rows) else FIRST_GAIN) * plain
        best = self.curve.fastest(speed)
        self.promising = self.curve.fastest(np.concatenate([[0.0], speed[1:]]))
        return self.now if self.now is not None and speed[best] < STAY * speed[self.now] else best

    def joined(self, rows: int, seconds: float | None) -> None:
        self.prompts.add(rows, seconds)

    def learn(self, outcome: Outcome) -> None:
        rows, drafting = len(outcome.accepted), outcome.levels > 0
        self.emitted = rows, rows + sum(outcome.accepted)
        self.prompts.emitted(*self.emitted)
        self.alike = self.alike + 1 if drafting == self.drafting else 1
        self.drafting = drafting
        self.last = (rows, outcome.levels, outcome.nodes) if self.alike > SETTLING else None

    def took(self, seconds: float) -> None:
        """The mean of rounds of one kind that follow each other is learnt at once."""
        last, self.last = self.last, None
        if self.curve is None:
            return
        self.timed = True
        if self.drafting:
            rows, tokens = self.emitted
            self.spent += seconds - tokens / rows * self.curve.plain(rows)
        if last is None:
            return
        if last != self.kind:
            self._learn_seconds()
            self.kind = last
        self.seconds, self.count = self.seconds + seconds, self.count + 1
        if self.count == STRETCH:
            self._learn_seconds()

    def changed(self, rows: int, levels: int) -> None:
        if self.curve is not None:
            self._learn_seconds()
            self.curve.forget(rows, levels)

    def _learn_seconds(self) -> None:
        if self.count:
            self.curve.took(*self.kind, self.seconds / self.count, self.count)
        self.seconds, self.count = 0.0, 0


def _load(rows: int) -> int:
    """The power of two that is nearest by ratio: so many rows and one less, as while a row is free, are of one load."""
    return round(math.log2(rows)) if rows else 0
