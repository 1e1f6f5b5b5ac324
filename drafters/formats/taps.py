"""The search for the hidden states that a drafter reads, when nothing says which they are.

All of the target's hidden states are known from one pass, so trying other taps costs a forward of the drafter's. The
search goes stage by stage: many candidates on little text, the best of them on more.
"""

import itertools
from collections.abc import Callable, Iterable
from math import comb

Taps = tuple[int, ...]
Score = Callable[[Taps, int], float]  # taps, stage -> how well the drafter follows the answers of this stage

MANY = 300  # so many candidates may be tried on the least text
BEST = (4, 16, 4)  # how many of the best: whose neighbours are tried, that enter the second stage, and the third
STAGES = 3


def search_taps(score: Score, states: int, count: int, also: Iterable[Taps] = ()) -> tuple[list[Taps], int]:
    """The taps that look best, the best first, and how many were tried.

    states: how many hidden states the target has. count: how many the drafter reads. also: candidates that are
    plausible for other reasons. First come all ascending combinations, or those of a grid if there are too many. Then
    one tap at a time is changed in the best of them, or two change places, until nothing gets better.
    """
    scores: dict[Taps, float] = {}

    def best(number: int) -> list[Taps]:
        return sorted(scores, key=scores.__getitem__, reverse=True)[:number]

    def add(candidates: Iterable[Taps]) -> None:
        for taps in candidates:
            if taps not in scores:
                scores[taps] = score(taps, 0)

    add(itertools.combinations(grid(states, count), count))
    add(also)
    while True:
        leaders = best(BEST[0])
        for taps in leaders:
            add(neighbours(taps, states))
        if best(BEST[0]) == leaders:
            break
    finalists = best(BEST[1])
    for stage, number in ((1, BEST[2]), (2, BEST[2])):
        again = {taps: score(taps, stage) for taps in finalists}
        finalists = sorted(again, key=again.__getitem__, reverse=True)[:number]
    return finalists, len(scores)


def grid(states: int, count: int) -> list[int]:
    """Return the hidden states of which all combinations are tried.

    These are all hidden states, or as many as the search can afford, evenly spread from the first to the last.
    """
    size = states
    while comb(size, count) > MANY:
        size -= 1
    return sorted({round(i * (states - 1) / max(size - 1, 1)) for i in range(size)})


def neighbours(taps: Taps, states: int) -> Iterable[Taps]:
    """One tap changed, or two exchanged."""
    for i, tap in itertools.product(range(len(taps)), range(states)):
        if tap not in taps:
            yield (*taps[:i], tap, *taps[i + 1 :])
    for i, j in itertools.combinations(range(len(taps)), 2):
        swapped = list(taps)
        swapped[i], swapped[j] = swapped[j], swapped[i]
        yield tuple(swapped)
