"""Timing of real rounds: the one timer that everything in this room measures with.

No part of a round is timed alone in a loop, where caches are warmer than in decoding.
"""

import statistics
import time
from collections import abc
from collections.abc import Callable

from tqdm import tqdm

from specdec.contracts import Drafter
from specdec.engine.engine import Engine
from specdec.engine.report import Reads
from specdec.engine.sequence import Sequence
from specdec.structs import Sampling
from specdec.trees import Tree

CONTEXT = 128  # tokens before the rounds that are timed
SETTLE = 2  # rounds of a turn that are not timed: the first rounds allocate memory, and absorb what plain rounds left
BUSY = 1.3  # slowest to fastest turn of plain rounds, above which another program disturbed the timing

Seconds = tuple[float, float]  # of a round: all but the target's forward, and that forward (0 if replayed as a whole)


def room_for(engine: Engine, rounds: int, turns: int = 1, context: int = CONTEXT) -> int:
    """Return the tokens of a row that has room for so many timed rounds in each of so many turns."""
    return min(engine.target.config.context, context + 3 + turns * (SETTLE + rounds) * engine.round.path)


def time_rounds(
    engine: Engine,
    rows: int,
    rounds: int,
    turns: abc.Sequence[Callable[[], object]] = (lambda: None,),
    *,
    context: int = CONTEXT,
    sampling: Sampling | None = None,
) -> list[list[Seconds]]:
    """Return the seconds of `rounds` rounds of `rows` rows for each turn, or of as many as a row has room for.

    turns: called before the rounds of each turn, for example to choose another number of levels.
    context: tokens before the first round, or fewer if the room is too small.

    Raises ValueError if a row has no room for a single timed round.
    """
    path, clock, found = engine.round.path, engine.loop.batch.clock, []
    count = min(SETTLE + rounds, (engine.room - 3) // path)
    if count <= SETTLE:
        least = (SETTLE + 1) * path + 3
        raise ValueError(f"a text may have {engine.room} tokens, and to record and time rounds takes {least}")
    length = max(1, min(context, engine.room - count * path - 2))
    texts: list[Sequence] = []
    for turn in turns:
        turn()
        if not texts or length + max(len(row.tokens) for row in texts) + (count + 1) * path >= engine.room:
            _end(engine, texts)
            texts = _begin(engine, rows, length, sampling)
        seconds: list[Seconds] = []
        while len(seconds) < count:
            mark, begun = clock.position - 1, time.perf_counter()
            report = engine.step()
            whole = time.perf_counter() - begun
            if report is not None and not report.prefill:
                forward = clock.seconds(mark).get("verify", 0.0)
                seconds.append((whole - forward, forward))
        found.append(seconds[SETTLE:])
    _end(engine, texts)
    return found


def _begin(engine: Engine, rows: int, length: int, sampling: Sampling | None) -> list[Sequence]:
    """Add rows of `length` tokens that no token ends."""
    # As many EOS ids as `generate` passes: compiled rounds depend on that number.
    eos = frozenset(range(-len(engine.target.eos), 0))
    texts = [[(7 * i + 3 + row) % engine.target.vocab for i in range(length)] for row in range(rows)]
    return [engine.add(text, max_new_tokens=engine.room, sampling=sampling, eos=eos) for text in texts]


def _end(engine: Engine, texts: abc.Sequence[Sequence]) -> None:
    for sequence in texts:
        engine.abort(sequence)
    while texts and engine.step() is not None:
        pass


class TreeTimer:
    """Times rounds of trees, each with an engine of its own that is made once."""

    def __init__(self, target, drafter: Drafter, sampling: Sampling | None = None, **how):
        """Begin without engines. how: settings of the engines."""
        self.pair, self.sampling, self.how = (target, drafter), sampling, how
        self.engines: dict[Tree | None, Engine] = {}

    def seconds(self, tree: Tree | None, rows: int, rounds: int, context: int = CONTEXT) -> list[Seconds]:
        """Return the seconds of rounds of a tree; None: of plain rounds."""
        if tree not in self.engines:
            parts = self.pair[:1] if tree is None else (*self.pair, tree)
            self.engines[tree] = Engine(*parts, **self.how)
            self.seconds(tree, rows, 1)  # the first rounds find memory and code
        engine = self.engines[tree]
        engine.reserve(rows, room_for(engine, rounds, context=context), reads=Reads.TOKENS)
        return time_rounds(engine, rows, rounds, context=context, sampling=self.sampling)[0]


def median(seconds: abc.Sequence[Seconds]) -> Seconds:
    """Return the median of each part."""
    return tuple(statistics.median(parts) for parts in zip(*seconds, strict=True))


def in_turns(runs: abc.Sequence[Callable[[], object]], turns: int, shown: str = "") -> list[list]:
    """Return what each run returned, by turn.

    All runs take turns, and every other turn goes backwards, so that other load of the machine disturbs all runs alike.
    shown: the name of a bar on the terminal.
    """
    found: list[list] = [[] for _ in runs]
    with tqdm(total=turns * len(runs), desc=shown, mininterval=1.0, disable=not shown) as bar:
        for turn in range(turns):
            for i in range(len(runs)) if turn % 2 == 0 else reversed(range(len(runs))):
                found[i].append(runs[i]())
                bar.update()
    return found


def busy(plain: abc.Sequence[float]) -> bool:
    """Return whether another program disturbed the timing, by the seconds of a plain round in each turn."""
    return max(plain) > BUSY * min(plain)
