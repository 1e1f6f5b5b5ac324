"""Engines for sequences that come and go, where rounds are recorded: what is compiled before the first of them, and
what such rounds cost.

Costs are measured once for a machine, a pair, a tree, a crowd and a way to record, and kept in the user's cache folder.
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

SETTLE, STEPS = 2, 8  # rounds of a kind in a row: so many do not count, and so many do


@dataclass(frozen=True)
class Crowd:
    """What `Engine.reserve` is told where sequences come and go."""

    rows: int
    room: int
    reads: Reads = Reads.TOKENS

    @contextmanager
    def begun(self, engine: Engine) -> Iterator[None]:
        """Room for them, and nothing is kept of their prompts."""
        prefixes, engine.prefixes = engine.prefixes, None
        try:
            engine.reserve(self.rows, self.room, reads=self.reads)
            yield
        finally:
            engine.prefixes = prefixes


def adaptive_engine(name: str, crowd: Crowd, target, drafter: Drafter, tree: TreePolicy, *given, **how) -> Engine:
    """An engine whose rounds follow the policy of this name. given, how: as for `Engine`. Where rounds are recorded
    what they cost is measured with the engine itself."""
    kind, _ = parts_of(name)
    probe = (Probe if kind == Survival.name else DepthProbe)(sizes_of(over_block(drafter, tree)))
    probe.name = kind
    engine = Engine(target, drafter, tree, *given, adaptive=probe, **how)
    costs = None if engine.graphs is None else partial(kept_recorded_curve, engine, crowd)
    prepare(engine, crowd)
    engine.adaptive = make_policy(name, target, drafter, tree, rows=crowd.rows, costs=costs)
    return engine


def prepare(engine: Engine, crowd: Crowd) -> None:
    """Compile what a crowd is decoded with at temperature 0, whatever number of them, if the engine compiles. Other
    rounds are compiled as soon as they are played. An adaptive policy is a `DepthProbe`."""
    if engine.graphs is None or not engine.graphs.backend.any_bound:
        return
    with crowd.begun(engine):
        for number in widths_up_to(crowd.rows):
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
    rest, busy, choices, numbers = {}, False, levels_of(engine), widths_up_to(crowd.rows)
    with crowd.begun(engine):
        for number in numbers:
            found = [_time_steps(engine, number, STEPS) for _ in range(repeats)]
            plain = [turn[0] for turn in found]
            busy = busy or max(plain) > BUSY * min(plain)
            rest[number] = np.interp(range(engine.policy.steps + 1), choices, np.min(found, 0)).tolist()
    verify = {number: dict.fromkeys(engine.adaptive.sizes, 0.0) for number in numbers}
    return Curve(numbers, rest, verify, only=choices, padded=True), busy


def _time_steps(engine: Engine, rows: int, steps: int) -> list[float]:
    """Seconds of a round of so many rows, of so many rounds the one in the middle. With a `DepthProbe` for each number
    of levels that rounds may draft."""
    choices = [0] if engine.adaptive is None else levels_of(engine)
    new = (SETTLE + STEPS) * len(choices) * engine.round.path + 1
    if engine.room < new + 2:
        raise ValueError(f"a text may have {engine.room} tokens, and to record and time rounds takes {new + 2}")
    length, added, found = min(CONTEXT, engine.room - new - 1), [], []
    for row in range(rows):
        prompt = [(7 * i + 3 + row) % engine.target.vocab for i in range(length)]
        added.append(engine.add(prompt, max_new_tokens=new, sampling=Sampling(), eos=frozenset()))
    for number in choices:
        if engine.adaptive is not None:
            engine.adaptive.levels = number
        seconds = []
        while len(seconds) < SETTLE + steps:
            begun = time.perf_counter()
            report = engine.step()
            seconds += [] if report.prefill else [time.perf_counter() - begun]
        found.append(float(np.median(seconds[SETTLE:])))
    for sequence in added:
        engine.abort(sequence)
    while engine.step() is not None:
        pass
    return found
