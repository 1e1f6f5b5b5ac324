"""The policy `ema`, a bandit over draft lengths.

The arms are the numbers of levels that a round may draft. The bandit knows three things of an arm:

    tokens     1 + the sum over its levels of the probability that a round accepts so far: running averages
    seconds    speed x (costs + excess): the measured costs of its rounds, what they take longer where they are served,
               and how fast the machine is lately
    evidence   the blocks of rounds that its excess was learnt from; the standard error is NOISE / sqrt(1 + evidence)

It plays the arm with the most tokens per second. After plain rounds, and at a load at which no drafts were played,
drafts count with their lower bound, one standard error below. The arm with the best upper bound, two standard errors
above, is tried for a block as often as that costs no more than SHARE of the time.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from typing_extensions import override

from specdec.engine.adaptive import Outcome, Policy
from specdec.tuning.costs import Costs, Kind

# Rounds of a choice. It takes 80 us after a forward, which is less than a hundredth of rounds of 1 ms. With numpy it
# takes 300: for so few numbers lists are faster, most of all where weights have emptied the caches.
BLOCK = 16
SETTLE = 4  # rounds after a change that do not count: the drafter absorbs the positions of plain rounds
NOISE = 0.1  # share by which a block on a shared machine differs from the next block, whatever it plays
SHARE = 0.01  # of the time goes into tries at most: a fifth of the 5 % that a policy may lose to the best fixed choice
MOST_BLOCKS = 16  # of evidence at most: NOISE / 4, below which two arms are equal
OLD = 1 / (2 * MOST_BLOCKS)  # share of the evidence that a block of another arm takes, which halves it in 22 blocks
WEIGHT = 20.0  # rows that the prior of an acceptance rate counts: a standard error of 0.11 at most
MEMORY = 0.98  # share of an observation that is left after a round that observed its level: an answer of 50 rounds
RETURN = 0.998  # the same after a round that did not observe it: ten answers
NEAR = 0.75  # octaves of rows that are one load: a row more or less, as requests come and go, changes nothing
BEGIN = 5  # first rounds, which draft as deep as can be: levels that are not drafted are not observed
LATELY = 256  # sequences whose prompts count in full


class Rates:
    """For every level the probability that its token is accepted if the previous level was: decayed counts."""

    def __init__(self, prior: Sequence[float]):
        """Begin with a prior: for each level, how often it is accepted if the previous one was."""
        self.prior = [min(max(rate, 0.01), 0.99) for rate in prior]
        self.hits, self.trials = [0.0] * len(prior), [0.0] * len(prior)
        self.missed = 0  # rounds that drafted nothing, which have not been counted yet

    def add(self, accepted: Iterable[int], ended: Iterable[bool]) -> None:
        """Count the rows of one round: tokens that each accepted, and whether its path ended in a leaf."""
        hits, trials = [0] * len(self.hits), [0] * len(self.hits)
        for count, leaf in zip(accepted, ended, strict=True):
            for level in range(count):
                hits[level] += 1
            for level in range(count + (not leaf)):  # after a leaf nothing is known of the next level
                trials[level] += 1
        left, self.missed = RETURN**self.missed, 0
        for level, seen in enumerate(trials):
            memory = left * (MEMORY if seen else RETURN)
            self.hits[level] = memory * self.hits[level] + hits[level]
            self.trials[level] = memory * self.trials[level] + seen

    def tokens(self, errors: float = 0.0) -> list[float]:
        """Return the expected tokens of a round by levels [D+1]. errors: standard errors added to each rate."""
        left, reach, tokens = RETURN**self.missed, 1.0, [1.0]
        for prior, hits, trials in zip(self.prior, self.hits, self.trials, strict=True):
            counted = left * trials + WEIGHT
            rate = (left * hits + WEIGHT * prior) / counted
            reach *= min(rate + errors * math.sqrt(rate * (1 - rate) / counted), 1.0)
            tokens.append(tokens[-1] + reach)
        return tokens


@dataclass
class Prompts:
    """The cost of absorbing prompts into the drafter, which only drafts pay for."""

    seconds: float = 0.0
    absorbed: float = 0.0  # sequences that those seconds belong to
    joined: float = 0.0  # all sequences
    tokens: float = 0.0  # that these have emitted

    def add(self, rows: int, seconds: float | None) -> None:
        """Count sequences that joined, and the seconds of absorbing their prompts if they were absorbed."""
        self.joined += rows
        if seconds is not None:
            self.seconds, self.absorbed = self.seconds + seconds, self.absorbed + rows
        if self.joined > LATELY:
            self.joined, self.tokens = self.joined / 2, self.tokens / 2
            self.seconds, self.absorbed = self.seconds / 2, self.absorbed / 2

    def price(self, running: int) -> float:
        """Return seconds for each token. A running sequence has more tokens to come, so it does not count as one."""
        if not (self.absorbed and self.tokens):
            return 0.0
        return self.seconds / self.absorbed * max(self.joined - running, 1.0) / self.tokens


@dataclass
class Load:
    """What is known of the arms at loads of about as many rows."""

    excess: list[float]  # [D+1] seconds that a served round takes longer than the measured costs
    evidence: list[float]  # [D+1] blocks that these were learnt from
    credit: float = 0.0  # seconds that tries may cost now


class Bandit(Policy):
    """Drafts as deep as gives the most expected tokens per second."""

    name = "ema"
    timed = False  # a server reports how long rounds take
    rounds = 0  # planned so far
    now: int | None = None  # the arm that is played, apart from tries
    load, levels, left = -1, 0, 0  # of the current block: its load, its levels, and the rounds that are left
    trying, wished = False, False  # whether the block is a try, and whether the last choice was to draft again
    pace = 0.0  # seconds of a row's token by the arm that is played
    speed = 1.0  # of the machine: a round takes so many times as long as expected
    last: tuple[int, int, int, int] | None = None  # rows, levels, nodes and tokens of the round learnt last

    def __init__(self, costs: Costs, kinds: Sequence[Kind], prior: Sequence[float]):
        """Begin with measured costs, kinds of rounds of 0, 1, ... D levels [D+1], and the prior of `Rates` [D]."""
        self.costs, self.kinds, self.rates, self.prompts = costs, list(kinds), Rates(prior), Prompts()
        self.loads: dict[int, Load] = defaultdict(lambda: Load([0.0] * len(kinds), [0.0] * len(kinds)))
        self.kind = (-1, 0)  # load and levels of the rounds that are being timed
        self.fresh, self.since = True, 0  # the first block of that kind since a change, and its rounds so far
        self.block: list[tuple[float, float]] = []  # seconds and expected seconds of these
        self._known: dict[tuple, float] = {}

    # Choices

    @override
    def plan(self, rows: int) -> int:
        self.rounds += 1
        if self._begins():
            return self.costs.choices[-1]
        load = math.log2(max(rows, 1))
        if not self.left or abs(load - self.load) > NEAR:
            self.load, self.left = round(load), BLOCK
            self.levels = self._choose(rows)
        self.left -= 1
        return self.levels

    def _begins(self) -> bool:
        return self.rounds <= BEGIN

    def _choose(self, rows: int) -> int:
        self._close()
        load, choices, seconds = self.loads[self.load], self.costs.choices, self._seconds(rows)
        error = [NOISE / math.sqrt(1 + blocks) if self.timed else 0.0 for blocks in load.evidence]
        speed, likely, upper = self._speed(rows, seconds), self.rates.tokens(), self.rates.tokens(2.0)
        prompts = rows * self.prompts.price(rows) if self.timed else 0.0
        for levels, took in enumerate(seconds):
            # An arm that was never served here may be as fast as it was measured.
            own = took if load.evidence[levels] else min(took, self.speed * self._expected(rows, levels))
            upper[levels] *= speed[levels] / likely[levels] * (1 + 2 * error[levels]) * took / own
            if levels:
                speed[levels] /= 1 + prompts * speed[levels]
                upper[levels] /= 1 + prompts * upper[levels]
        draft = max(choices[1:], key=speed.__getitem__)
        drafting = self.now and load.evidence[self.now]
        best = draft if speed[draft] > speed[0] * (1 if drafting else 1 + error[draft]) else 0
        # After plain rounds a drafter has much to absorb, so drafting must seem faster for a whole block.
        wished, self.wished = self.wished, best > 0 and self.now == 0
        self.now = 0 if self.wished and not wished else best
        self.wished = self.wished and self.now == 0
        self.pace = 1 / speed[self.now]
        # Plain rounds are what all else is compared with. So their first try at a load needs no credit, but a block of
        # this load before: a load of a few rounds lies between two others, and a try of a few rounds teaches nothing.
        first = self.now > 0 and any(load.evidence) and not load.evidence[0] and upper[0] > speed[self.now]
        tried = 0 if first else max((d for d in choices if d != self.now), key=upper.__getitem__, default=self.now)
        price = BLOCK * seconds[tried] * max(1 - speed[tried] * self.pace, 0.0)
        if self.now == 0:  # the drafter absorbs each row's text, about a forward of each
            price += rows * self._expected(1, 0)
        # A second block in a row would not measure the arm, as `_close` attributes it to the machine's speed.
        self.trying = not self.trying and upper[tried] > speed[self.now] and (first or load.credit >= price)
        load.credit = min(load.credit, price) if self.trying else load.credit
        return tried if self.trying else self.now

    def _speed(self, rows: int, seconds: Sequence[float]) -> list[float]:
        """Return tokens per second of a row by levels [D+1]. seconds [D+1]: of a round."""
        return [tokens / took for tokens, took in zip(self.rates.tokens(), seconds, strict=True)]

    def _seconds(self, rows: int) -> list[float]:
        """Return the seconds of a round by levels [D+1], as they are expected lately."""
        own = [self._expected(rows, levels) for levels in range(len(self.kinds))]
        return [self.speed * max(took + more, took / 10) for took, more in zip(own, self._excess(), strict=True)]

    def _excess(self) -> list[float]:
        """Return the excess of each number of levels [D+1].

        Arms with little evidence take after the other drafts, or where there are none after the plain rounds; loads
        without evidence after the nearest load with any.
        """
        known = [load for load, what in self.loads.items() if any(what.evidence)]
        if not known:
            return [0.0] * len(self.kinds)
        here = self.loads[min(known, key=lambda load: abs(load - self.load))]
        plain, *drafts = zip(here.evidence, here.excess, strict=True)
        blocks = sum(seen for seen, _ in drafts)
        pool = sum(seen * excess for seen, excess in drafts) / blocks if blocks else plain[1]
        first = plain[1] if plain[0] else pool
        return [first, *((seen * excess + pool) / (seen + 1) for seen, excess in drafts)]

    def _expected(self, rows: int, levels: int, nodes: int | None = None) -> float:
        """Return the measured seconds of a round. nodes: that were verified; None: all of the tree."""
        key = rows, levels, nodes
        if key not in self._known:
            kind = self.kinds[levels]
            if nodes is not None and nodes < kind.nodes:
                kind = kind._replace(nodes=nodes, cut=True)
            self._known[key] = float(self.costs.seconds(kind, rows))
        return self._known[key]

    # Learning

    @override
    def joined(self, rows: int, seconds: float | None) -> None:
        self.prompts.add(rows, seconds)

    @override
    def learn(self, outcome: Outcome) -> None:
        every = [*outcome.accepted, *outcome.others]
        self.last = len(every), outcome.levels, outcome.nodes, len(every) + sum(every)
        self.prompts.tokens += self.last[-1]
        if outcome.levels:
            self.rates.add(outcome.accepted, outcome.ended)
        else:
            self.rates.missed += 1
        if not self.timed:
            self._pay(self._expected(*self.last[:3]))

    @override
    def took(self, seconds: float) -> None:
        if self.last is None:
            return
        self.timed = True
        self._pay(seconds)
        (rows, levels, nodes, _), self.last = self.last, None
        kind = self.load, levels
        if kind != self.kind:
            self._close()
            self.kind, self.fresh, self.since = kind, True, 0
        self.since += 1
        if self.since > SETTLE:
            self.block.append((seconds, self._expected(rows, levels, nodes)))

    @override
    def changed(self, rows: int, levels: int) -> None:
        self.block = []
        load = self.loads[round(math.log2(max(rows, 1)))]
        load.excess[levels] = load.evidence[levels] = 0.0

    def _pay(self, seconds: float) -> None:
        """Account for a round: a try pays what it took longer than the arm that is played takes for as many tokens."""
        if self.last is None:
            return
        rows, *_, tokens = self.last
        load = self.loads[self.load]
        load.credit += tokens / rows * self.pace - seconds if self.trying else SHARE * seconds

    def _close(self) -> None:
        """Learn from a block.

        Right after a change the machine is what it was before, so what is new is the excess of the arm; later, what is
        new is the speed of the machine. So arms are compared by blocks that were near each other in time.
        """
        if not self.block:
            return
        taken, own = map(median, zip(*self.block, strict=True))
        weight = len(self.block) / BLOCK
        load, levels = self.loads[self.kind[0]], self.kind[1]
        if self.fresh or not load.evidence[levels]:
            load.evidence = [seen * (1 - OLD) ** weight for seen in load.evidence]
            load.evidence[levels] = min(load.evidence[levels] + weight, MOST_BLOCKS)
            found = taken / self.speed - own
            load.excess[levels] += (found - load.excess[levels]) * weight / load.evidence[levels]
        else:
            known = self.speed * max(own + load.excess[levels], own / 10)
            self.speed *= (taken / known) ** (weight / 2)
        self.fresh, self.block = False, []
