"""How often each level was accepted lately, and the policy `ema`, which drafts as deep as that pays."""

from collections.abc import Iterable, Sequence

import numpy as np

from specdec.adaptive.costed import Costed
from specdec.adaptive.curve import Curve
from specdec.adaptive.policy import Outcome

WEIGHT = 20.0  # rows' worth of observations that the prior counts
MEMORY = 0.98  # share of an observation's weight that is left after a round that observed its level
RETURN = 0.998  # the same after a round that did not: what is not observed goes back to the prior
BEGIN = 5  # first rounds, that draft as deep as can be, as what is not drafted is not observed


class Rates:
    """For every level the probability that its token is accepted where the ones before were: decayed counts."""

    def __init__(self, prior: Sequence[float]):
        """prior: the probabilities to begin with, level by level."""
        self.prior = np.clip(np.asarray(prior, dtype=float), 0.01, 0.99)
        # Lists: counting is done every round, and a few steps of Python are quicker than numpy for so few numbers.
        self.hits, self.trials = [0.0] * len(prior), [0.0] * len(prior)
        self.missed = 0  # rounds that drafted nothing, which have not been counted yet

    def add(self, accepted: Iterable[int], ended: Iterable[bool]) -> None:
        """Rows of one round: how many tokens each accepted, and whether its path ended in a leaf, so that nothing is
        known of the level behind it."""
        hits, trials = [0] * len(self.hits), [0] * len(self.hits)
        for count, leaf in zip(accepted, ended, strict=True):
            for level in range(count):
                hits[level] += 1
            for level in range(count + (not leaf)):
                trials[level] += 1
        self._count_missed()
        for level, seen in enumerate(trials):
            kept = MEMORY if seen else RETURN
            self.hits[level] = kept * self.hits[level] + hits[level]
            self.trials[level] = kept * self.trials[level] + seen

    def unobserved(self) -> None:
        """A round that drafted nothing."""
        self.missed += 1

    def _count_missed(self) -> None:
        if self.missed:
            left, self.missed = RETURN**self.missed, 0
            self.hits, self.trials = [left * count for count in self.hits], [left * count for count in self.trials]

    def values(self) -> np.ndarray:
        """[D]"""
        self._count_missed()
        return np.add(self.hits, WEIGHT * self.prior) / np.add(self.trials, WEIGHT)

    def reach(self) -> np.ndarray:
        """[D] the probability that a round accepts this level, if it drafts so deep."""
        return self.values().cumprod()

    def speed(self, curve: Curve, sizes: np.ndarray, rows: int) -> np.ndarray:
        """[D+1] tokens a second that a row is expected to get, by levels. sizes: as for `Ema`."""
        rest, verify = curve.at(rows)
        tokens = np.concatenate([[1.0], 1 + self.reach().cumsum()])
        return tokens[: len(sizes)] / (rest[: len(sizes)] + verify[sizes])


class Ema(Costed):
    """The depth with the most expected tokens a second: by running averages of acceptance, and by measured costs."""

    name = "ema"

    def __init__(self, curve: Curve, sizes: Sequence[int], prior: Sequence[float]):
        """sizes [D+1]: nodes of the trees of 0, 1, ... D levels. prior [D]: as for `Rates`."""
        super().__init__()
        self.curve, self.rates = curve, Rates(prior)
        self.sizes = np.asarray(sizes)

    def _begins(self) -> bool:
        return self.rounds <= BEGIN

    def _best(self, rows: int) -> int:
        return self._fastest(rows, self.rates.speed(self.curve, self.sizes, rows))

    def learn(self, outcome: Outcome) -> None:
        super().learn(outcome)
        if outcome.levels:
            self.rates.add(outcome.accepted, outcome.ended)
        else:
            self.rates.unobserved()
