"""Engines with an adaptive policy, priced by rounds as they are played, and what a server compiles before it starts.

The costs of recorded rounds are measured once for a machine, a pair, a tree, a `Crowd` and a way to record, and stored
in the user's cache folder.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np

from specdec import kernels
from specdec.adaptive import Curve, Survival
from specdec.auto import BUSY, identity
from specdec.calibrate import CONTEXT, REPEATS, DepthProbe, Probe, make_policy, parts_of, sizes_of
from specdec.cli.files import Kept
from specdec.contracts import Drafter, TreePolicy
from specdec.engine.engine import Engine
from specdec.engine.fits import over_block
from specdec.engine.graphs import widths_up_to
from specdec.engine.report import Reads
from specdec.structs import Sampling

SETTLE, STEPS = 2, 8  # rounds of a kind in a row: the first few are not timed, the others are if there is room


@dataclass(frozen=True)
class Crowd:
    """The sequences that an engine is prepared for."""

    rows: int
    room: int | None = None  # tokens of each; None: as many as it takes to time rounds
    reads: Reads = Reads.TOKENS
    together: bool = False  # they begin together, so every round has all rows, and none is free for another sequence

    @contextmanager
    def begun(self, engine: Engine) -> Iterator[None]:
        """Reserve room for them in the engine, which stores no prompts meanwhile."""
        before = engine.prefixes, engine.compact
        engine.prefixes, engine.compact = None, not self.together
        try:
            room = self.room or CONTEXT + (SETTLE + STEPS) * engine.round.path + 3
            engine.reserve(self.rows, room, reads=self.reads)
            yield
        finally:
            engine.prefixes, engine.compact = before

    @property
    def widths(self) -> list[int]:
        """The numbers of rows that rounds are recorded for."""
        return [self.rows] if self.together else widths_up_to(self.rows)


def adaptive_engine(name: str, crowd: Crowd, target, drafter: Drafter, tree: TreePolicy, *given, **how) -> Engine:
    """Return an engine whose rounds follow the policy of this name. given, how: as for `Engine`.

    Recorded rounds are timed with the engine itself. If sequences come and go, they are compiled first."""
    kind, _ = parts_of(name)
    probe = (Probe if kind == Survival.name else DepthProbe)(sizes_of(over_block(drafter, tree)))
    probe.name = kind
    engine = Engine(target, drafter, tree, *given, adaptive=probe, **how)
    costs = None if engine.graphs is None else partial(kept_recorded_curve, engine, crowd)
    if not crowd.together:
        prepare(engine, crowd)
    engine.adaptive = make_policy(name, target, drafter, tree, rows=crowd.rows, costs=costs)
    return engine


def prepare(engine: Engine, crowd: Crowd) -> None:
    """Compile the rounds of greedy texts for every number of rows, if the engine compiles. Other rounds are compiled
    when they are first played. An adaptive policy must be a `DepthProbe`."""
    if engine.graphs is None or not engine.graphs.backend.any_bound:
        return
    with crowd.begun(engine):
        for number in crowd.widths:
            _time_steps(engine, number, 1)
    engine.graphs.finish()


def levels_of(engine: Engine) -> list[int]:
    """The numbers of levels that recorded rounds may draft. Compiled ones draft all or none, as each takes long to
    compile."""
    steps = engine.policy.steps
    return [0, steps] if engine.graphs.backend.any_bound else list(range(steps + 1))


def kept_recorded_curve(engine: Engine, crowd: Crowd) -> Curve:
    """The costs of rounds as this engine records them on this machine: read where they are kept, else measured and
    kept."""
    tree, backend = engine.policy, engine.graphs.backend
    who = identity(engine.target, engine.drafter, engine.drafter.acceptance) | {"of": "recorded load"}
    who |= {"tree": [type(tree).__name__, tree.topk, engine.adaptive.sizes], "crowd": str(crowd)}
    who |= {"backend": [type(backend).__name__, getattr(backend, "compiles", True), kernels.backends()]}
    measured = Kept("loads", who)
    if (kept := measured.read(lambda entries: Curve.of(entries["curve"]))) is not None:
        return kept
    curve, busy = measure_recorded_curve(engine, crowd)
    if busy:
        print("note: the machine was busy, so the costs of rounds are rough, and not kept", file=sys.stderr)
    if busy or any(graph.launched for graph in engine.graphs.batch.graphs.values()):
        return curve
    measured.write({"curve": curve.entries()})
    return curve


def measure_recorded_curve(engine: Engine, crowd: Crowd, repeats: int = REPEATS) -> tuple[Curve, bool]:
    """Times recorded rounds of 1, 2, 4, ... rows and of the levels that they may draft, with all that the host
    does for them. It is told as seconds beside the target's forward. Also returns whether the machine was busy, by
    plain rounds. The engine was prepared."""
    rest, busy, choices, numbers = {}, False, levels_of(engine), crowd.widths
    with crowd.begun(engine):
        for number in numbers:
            found = [_time_steps(engine, number, STEPS) for _ in range(repeats)]
            plain = [turn[0] for turn in found]
            busy = busy or max(plain) > BUSY * min(plain)
            rest[number] = np.interp(range(engine.policy.steps + 1), choices, np.min(found, 0)).tolist()
    verify = {number: dict.fromkeys(engine.adaptive.sizes, 0.0) for number in numbers}
    return Curve(numbers, rest, verify, only=choices, padded=True), busy


def _time_steps(engine: Engine, rows: int, steps: int) -> list[float]:
    """Return the median seconds of a round of so many rows, of `steps` rounds or as many as there is room for. With a
    `DepthProbe`, return one for each number of levels that rounds may draft."""
    path, found = engine.round.path, []
    count = min(SETTLE + steps, (engine.room - 3) // path)
    if count <= SETTLE:
        least = (SETTLE + 1) * path + 3
        raise ValueError(f"a text may have {engine.room} tokens, and to record and time rounds takes {least}")
    new = count * path + 1
    length = min(CONTEXT, engine.room - new - 1)
    for number in [0] if engine.adaptive is None else levels_of(engine):
        if engine.adaptive is not None:
            engine.adaptive.levels = number
        added, seconds = [], []
        for row in range(rows):
            prompt = [(7 * i + 3 + row) % engine.target.vocab for i in range(length)]
            added.append(engine.add(prompt, max_new_tokens=new, sampling=Sampling(), eos=frozenset()))
        while len(seconds) < count:
            begun = time.perf_counter()
            report = engine.step()
            seconds += [] if report.prefill else [time.perf_counter() - begun]
        found.append(float(np.median(seconds[SETTLE:])))
        for sequence in added:
            engine.abort(sequence)
        while engine.step() is not None:
            pass
    return found
