"""Many generations in one process: does memory stay flat, and is every output that of a fresh start?"""

import gc
import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specdec.engine.engine import Engine
from specdec.structs import Sampling

MakeEngine = Callable[[bool], Engine]  # speculative, or plain


@dataclass(frozen=True)
class DriftCase:
    """One generation, all of which follows from a seed and a number."""

    prompts: list[list[int]]
    max_new_tokens: int
    sampling: Sampling
    speculative: bool
    seed: int

    @classmethod
    def draw(cls, seed: int, number: int, vocab: int, longest_prompt: int, most_new: int) -> "DriftCase":
        """One to three prompts of random ids and lengths. Two of three cases are speculative, half are sampled."""
        rng = random.Random(f"{seed} {number}")
        lengths = [rng.randint(1, longest_prompt) for _ in range(rng.randint(1, 3))]
        return cls(
            prompts=[[rng.randrange(vocab) for _ in range(length)] for length in lengths],
            max_new_tokens=rng.randint(1, most_new),
            sampling=Sampling(rng.choice([0.0, 0.8])),
            speculative=rng.random() < 2 / 3,
            seed=number,
        )

    def decode(self, engine: Engine) -> str:
        """Decode, and return a digest of all token ids. No end-of-text token ends a row."""
        result = engine.generate(
            self.prompts,
            max_new_tokens=self.max_new_tokens,
            sampling=self.sampling,
            seed=self.seed,
            eos=frozenset(),
        )
        return hashlib.sha256(json.dumps([row.tokens for row in result.rows]).encode()).hexdigest()


@dataclass(frozen=True)
class MemoryMark:
    """What was in memory after so many generations, garbage collected."""

    generations: int
    bytes: int
    objects: int  # that Python's garbage collector knows


def decode_all(
    make: MakeEngine,
    cases: Sequence[DriftCase],
    every: int,
    memory: Callable[[], int],
    progress: Callable[[], None] = lambda: None,
) -> tuple[list[str], list[MemoryMark]]:
    """Decode all cases with one engine of each kind. Returns their digests, and what was in memory after every
    `every`th."""
    engines = {kind: make(kind) for kind in (True, False)}
    digests, marks = [], []
    for number, case in enumerate(cases, 1):
        digests.append(case.decode(engines[case.speculative]))
        if number % every == 0 or number == len(cases):
            gc.collect()
            marks.append(MemoryMark(number, memory(), len(gc.get_objects())))
        progress()
    return digests, marks


def different(
    make: MakeEngine, cases: Sequence[DriftCase], digests: Sequence[str], progress: Callable[[], None] = lambda: None
) -> list[int]:
    """Numbers of the cases that an engine made for that case alone decodes otherwise."""
    out = []
    for number, (case, digest) in enumerate(zip(cases, digests, strict=True)):
        if case.decode(make(case.speculative)) != digest:
            out.append(number)
        progress()
    return out


@dataclass(frozen=True)
class MemoryGrowth:
    """How much memory grew from the first mark, when all is warm, to the largest later one."""

    bytes: int
    objects: int

    @classmethod
    def of(cls, marks: Sequence[MemoryMark]) -> "MemoryGrowth":
        if len(marks) < 2:
            raise ValueError("growth needs two marks: decode more generations than lie between marks")
        first, later = marks[0], marks[1:]
        return cls(max(m.bytes for m in later) - first.bytes, max(m.objects for m in later) - first.objects)
