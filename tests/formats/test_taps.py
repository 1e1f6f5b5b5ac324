"""The search over taps finds the best ones of all without trying all, on scores as hidden states give them."""

import math
import random

import pytest

from specdec.drafters.formats.taps import search_taps


def landscape(true, noise):
    """Score by the distance of each tap to the true one of its stream, the last stream counting most; noise falls from
    stage to stage, as there is more text."""

    def score(taps, stage):
        shaken = random.Random(hash((taps, stage))).gauss(0, noise / 4**stage)
        return shaken - sum((i + 1) * math.log1p(abs(a - b)) for i, (a, b) in enumerate(zip(taps, true, strict=True)))

    return score


@pytest.mark.parametrize(
    ("states", "true"),
    [(9, (2, 5, 8)), (33, (2, 16, 29)), (33, (29, 2, 16)), (81, (1, 40, 79)), (37, (2, 10, 18, 26, 34)), (81, (79,))],
)
def test_the_true_taps_are_found(states, true):
    for noise in (0.0, 0.2):
        found, tried = search_taps(landscape(true, noise), states, len(true))
        assert found[0] == true
        assert tried < 4000  # of 504 for the first, and up to 52 million


def test_what_is_plausible_is_tried_even_if_the_grid_leaves_it_out():
    only = (7, 31, 76)  # a needle: nothing around it says where it is
    assert search_taps(lambda taps, stage: float(taps == only), 81, 3, [only])[0][0] == only
