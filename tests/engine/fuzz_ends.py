"""Stops and grammars over token ids, drawn at random for scripts/fuzz_cases.py."""

import random

import numpy as np


class Digits:
    """A `Stop`: ends a text at the first two tokens a and b with 3 a + b = remainder modulo `of`."""

    def __init__(self, of: int, remainder: int):
        self.of, self.remainder, self.last = of, remainder, None

    def add(self, token: int) -> bool:
        done = self.last is not None and (3 * self.last + token) % self.of == self.remainder
        self.last = token
        return done


class Automaton:
    """A `Grammar`: a random automaton over token ids, some of whose states are final and some of which end a text."""

    def __init__(self, rng: random.Random, vocab: int, ends: frozenset[int], states: int = 5):
        self.ends, self.vocab = ends, vocab
        inner = [token for token in range(vocab) if token not in ends]
        self.following = [
            {
                token: rng.randrange(states)
                for token in rng.sample(inner, min(len(inner), rng.choice([1, 3, vocab // 2])))
            }
            for _ in range(states)
        ]
        self.final = {state for state in range(states) if rng.random() < 0.3}
        self.last = {state for state in range(1, states) if rng.random() < 0.15}

    def start(self) -> "Place":
        return Place(self)


class Place:
    """A `Matcher` of an automaton."""

    def __init__(self, automaton: Automaton):
        self.automaton, self.path = automaton, [0]

    @property
    def over(self) -> bool:
        return self.path[-1] in self.automaton.last

    def take(self, token: int) -> bool:
        state = self.automaton.following[self.path[-1]].get(token)
        if state is None or self.over:
            return False
        self.path.append(state)
        return True

    def back(self) -> None:
        self.path.pop()

    def allowed(self) -> np.ndarray:
        tokens = [*self.automaton.following[self.path[-1]]]
        if self.path[-1] in self.automaton.final:
            tokens += self.automaton.ends
        bits = np.zeros(-(-self.automaton.vocab // 8) * 8, np.uint8)
        bits[tokens] = 1
        return np.packbits(bits, bitorder="little")
