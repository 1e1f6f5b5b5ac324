"""The n-gram drafter for one row whose tokens are on the host, as numpy arrays.

It gives what the operators of `drafters.ngram` give, in a fraction of their time: a row has a few matches, and not one
for each place and token. There it says what is computed.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

Array = np.ndarray


def match_lengths(text: Array, most: int) -> Array:
    """How many of the last `most` tokens of text [n] end at each place but the last: [n-1]."""
    lengths = np.zeros(len(text) - 1, dtype=np.int32)
    places, count = np.flatnonzero(text[:-1] == text[-1]), 0
    while len(places) and count < most:
        count += 1
        lengths[places] = count
        places = places[places >= count]
        places = places[text[places - count] == text[-1 - count]]
    return lengths


def longer(text: Array, lengths: Array, token: int) -> Array:
    """The match lengths [n-1] one token further on."""
    grown = np.ones_like(lengths)
    grown[1:] += lengths[:-1]
    grown *= text[:-1] == token
    return grown


@dataclass(frozen=True)
class Voting:
    """How matches vote: the settings of an n-gram drafter."""

    lookup: bool
    base: float
    least: int  # the shortest match that votes
    vocab: int  # V
    target_ids: Array | None  # [U] the tokens that are drafted; None: all

    @cached_property
    def draft_ids(self) -> Array:
        """[V], -1 for tokens that are not drafted."""
        if self.target_ids is None:
            return np.arange(self.vocab)
        ids = np.full(self.vocab, -1)
        ids[self.target_ids] = np.arange(len(self.target_ids))
        return ids

    def chain(self, text: Array, lengths: Array, steps: int) -> tuple[list[int], list[float]]:
        """The winner, and the winner after it, `steps` times: draft ids, and log-probabilities of the path so far.

        text [n] has the match lengths [n-1] at the places that a token follows.
        """
        ids: list[int] = []
        logq, total = [], 0.0
        for step in range(steps):
            if step:
                token = ids[-1] if self.target_ids is None else int(self.target_ids[ids[-1]])
                lengths = longer(text, lengths, token)
            winner, logp = self.winner(text, lengths)
            total += logp
            ids.append(winner)
            logq.append(total)
        return ids, logq

    def winner(self, text: Array, lengths: Array) -> tuple[int, float]:
        """The draft id with the most votes, the lowest among equals, and its log-probability."""
        size = self.vocab if self.target_ids is None else len(self.target_ids)
        places = np.flatnonzero(lengths >= self.least)
        if not len(places):
            return 0, -math.log(size)
        lengths, ids = lengths[places], text[places + 1]
        longest = int(lengths.max())
        votes = np.power(self.base, (lengths - longest) - (places / len(text) if self.lookup else 0.0))
        if self.target_ids is not None:
            ids = self.draft_ids[ids]
            votes *= ids >= 0
        if len(ids) > 1:  # those for the same token together
            order = ids.argsort(kind="stable")
            ids, votes = ids[order], votes[order]
            firsts = np.flatnonzero(np.diff(ids, prepend=-2))
            ids, votes = ids[firsts], (np.maximum if self.lookup else np.add).reduceat(votes, firsts)
        best, even = votes.argmax(), self.base**-longest / self.vocab
        share = (votes[best] + even) / (votes.sum() + even * size)
        return (int(ids[best]) if votes[best] > 0 else 0), math.log(share)
