"""How often each level was accepted lately, and the policy `ema`, which drafts as deep as that pays."""

from collections.abc import Iterable, Sequence

import numpy as np

from specdec.adaptive.curve import Curve
from specdec.adaptive.policy import Costed, Outcome

WEIGHT = 20.0  # rows' worth of observations that the prior counts
MEMORY = 0.98  # share of an observation's weight that is left after a round that observed its level
RETURN = 0.998  # the same after a round that did not: what is not observed goes back to the prior
# The first rounds, and later one of so many, draft as deep as can be, as what is not drafted is not observed. After
# plain rounds the drafter has much to absorb, so that is tried less often.
BEGIN, DEEP, DEEP_AFTER_PLAIN = 5, 128, 1024
STAY = 1.02  # another depth is taken only if it is expected to be faster than this


class Rates:
    """For every level the probability that its token is accepted where the ones before were: decayed counts."""

    def __init__(self, prior: Sequence[float]):
        """prior: the probabilities to begin with, level by level."""
        self.prior = np.clip(np.asarray(prior, dtype=float), 0.01, 0.99)
        self.hits, self.trials = np.zeros(len(prior)), np.zeros(len(prior))

    def add(self, accepted: Iterable[int], ended: Iterable[bool]) -> None:
        """Rows of one round: how many tokens each accepted, and whether its path ended in a leaf, so that nothing is
        known of the level behind it."""
        hits, trials = np.zeros_like(self.hits), np.zeros_like(self.hits)
        for count, leaf in zip(accepted, ended, strict=True):
            hits[:count] += 1
            trials[: count + (not leaf)] += 1
        kept = np.where(trials > 0, MEMORY, RETURN)
        self.hits, self.trials = kept * self.hits + hits, kept * self.trials + trials

    def unobserved(self) -> None:
        """A round that drafted nothing."""
        self.hits *= RETURN
        self.trials *= RETURN

    def values(self) -> np.ndarray:
        """[D]"""
        return (self.hits + WEIGHT * self.prior) / (self.trials + WEIGHT)

    def reach(self) -> np.ndarray:
        """[D] the probability that a round accepts this level, if it drafts so deep."""
        return self.values().cumprod()


def fastest(tokens: np.ndarray, seconds: np.ndarray | float, now: int | None = None) -> int:
    """The index of the most tokens a second; that of `now`, if there is one, unless another is clearly better."""
    speed = tokens / seconds
    best = int(speed.argmax())
    return now if now is not None and speed[best] < STAY * speed[now] else best


def tries(rounds: int, now: int | None) -> bool:
    """Is this number of a round, where `now` levels are drafted lately, one that drafts as deep as can be?"""
    return rounds % (DEEP_AFTER_PLAIN if now == 0 else DEEP) == 0


class Ema(Costed):
    """The depth with the most expected tokens a second: by running averages of acceptance, and by measured costs."""

    name = "ema"

    def __init__(self, curve: Curve, sizes: Sequence[int], prior: Sequence[float]):
        """sizes [D+1]: nodes of the trees of 0, 1, ... D levels. prior [D]: as for `Rates`."""
        self.curve, self.rates = curve, Rates(prior)
        self.sizes = np.asarray(sizes)

    def _choose(self, rows: int) -> int:
        if self.rounds <= BEGIN or tries(self.rounds, self.now):
            return len(self.sizes) - 1
        rest, verify = self.curve.at(rows)
        tokens = np.concatenate([[1.0], 1 + self.rates.reach().cumsum()])
        depths = len(self.sizes)
        return self._settle(fastest(tokens[:depths], rest[:depths] + verify[self.sizes], self.now))

    def learn(self, outcome: Outcome) -> None:
        super().learn(outcome)
        if outcome.levels:
            self.rates.add(outcome.accepted, outcome.ended)
        else:
            self.rates.unobserved()
