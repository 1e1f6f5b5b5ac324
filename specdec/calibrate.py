"""Adaptive policies by name, what they need to know, and the engines that follow them.

What rounds cost is measured once for a machine, a pair, a tree and a number of rows, in some seconds, and stored in the
user's cache folder. Recorded rounds are timed with the engine that plays them later. How often drafts are right says
the drafter's acceptance.json, or a guess, until rounds have told.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from specdec import ops
from specdec.acceptance import Acceptance
from specdec.adaptive import NAMES, Curve, Draft, Ema, Fixed, Policy, Survival, Table
from specdec.adaptive.estimators import make_estimator
from specdec.auto import BUSY, add_rows, identity, step_seconds
from specdec.cli.files import Kept
from specdec.contracts import Drafter, TreePolicy
from specdec.engine.compatibility import over_block
from specdec.engine.engine import Engine
from specdec.engine.graphs import widths_up_to
from specdec.engine.report import Reads
from specdec.trees.optimal import most_nodes, optimal_paths

HELP = "draft by the load: table, ema, survival"
GUESS = 0.6  # how often a level is accepted where the one before was, if nobody has measured it
CONTEXT = 128  # tokens before the rounds that are timed
ROUNDS = 3  # timed in a row, of which the first does not count
REPEATS = 3
SETTLE, STEPS = 2, 8  # recorded rounds of a kind in a row: the first few are not timed, the others are if there is room
WIDTHS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def make_policy(
    name: str,
    target,
    drafter: Drafter,
    tree: TreePolicy,
    *,
    rows: int = 1,
    temperature: float = 0.0,
    recalibrate: bool = False,
    costs: Callable[[], Curve] | None = None,
) -> Policy:
    """The policy of a text: `fixed`, `ema`, `table`, `table:1=5,8=3,32=0`, `survival`, or `survival:told` with the
    name of an estimator. rows: the most that will be decoded at a time; temperature: of the acceptance to begin with.
    costs: what rounds cost, asked for only if the policy goes by that; None: as they are launched.

    ValueError, one sentence, for other names."""
    tree = over_block(drafter, tree)  # as the engine does: there are no levels behind a block
    curve = costs or partial(kept_curve, target, drafter, tree, rows, recalibrate)
    return assembled(name, curve, sizes_of(tree), first_rates(drafter.acceptance, tree, temperature))


def assembled(name: str, costs: Callable[[], Curve], sizes: Sequence[int], prior: Sequence[float]) -> Policy:
    """The policy of a text, with numbers of nodes by levels and rates to begin with. costs: what rounds cost, asked for
    only if the policy goes by that."""
    kind, detail = parts_of(name)
    levels = len(sizes) - 1
    if kind == "fixed":
        return Fixed(levels)
    if kind == "table":
        return Table.parse(detail, levels) if detail else Table.measured(costs(), sizes, prior)
    if kind == "ema":
        return Ema(costs(), sizes, prior)
    estimator = make_estimator(detail or "calibrated", levels)
    return Survival(costs(), sizes, prior, estimator)


def parts_of(name: str) -> tuple[str, str]:
    """A policy's kind, and what stands behind the colon. ValueError, one sentence, for one that there is not."""
    kind, _, detail = name.partition(":")
    if kind not in NAMES or (detail and kind not in ("table", "survival")):
        raise ValueError(f"there is no adaptive policy {name!r}; there are {', '.join(NAMES)}")
    return kind, detail


def sizes_of(tree: TreePolicy) -> list[int]:
    """Nodes of the trees of 0, 1, ... D levels."""
    return [1] + [tree.smaller(steps).num_draft_tokens for steps in range(1, tree.steps + 1)]


def first_rates(acceptance: Acceptance | None, tree: TreePolicy, temperature: float) -> list[float]:
    """For each level how often it is accepted where the one before was, of the trees that accept the most."""
    if acceptance is None:
        return [GUESS] * tree.steps
    table, taus = acceptance.nearest(temperature).table(), [1.0]
    table = [row[: tree.topk] for row in table]
    for steps, nodes in enumerate(sizes_of(tree)[1:], 1):
        if steps <= len(table):
            nodes = min(nodes, most_nodes(len(table[0]), steps))
            taus.append(acceptance.tau(optimal_paths(table[:steps], nodes), temperature))
        else:  # the last level that was measured goes on
            taus.append(taus[-1] + max(taus[-1] - taus[-2], 0.0) * GUESS)
    reach = np.maximum(np.diff(taus), 0.01)
    return np.clip(reach / np.concatenate([[1.0], reach[:-1]]), 0.05, 0.99).tolist()


# What rounds cost


class Probe(Policy):
    """Drafts as many levels and, if it cuts, verifies as many nodes as it is told to."""

    levels, width, cuts = 0, 0, True

    def __init__(self, sizes: Sequence[int], name: str = "probe", cuts: bool = True):
        self.sizes, self.name, self.cuts = sizes, name, cuts

    def plan(self, rows: int) -> int:
        return self.levels

    def looks(self) -> bool:
        return self.cuts and self.width < self.sizes[self.levels]

    def keep(self, draft: Draft) -> np.ndarray | None:
        paths = (draft.ancestors * draft.edges[:, None]).sum(-1)
        return np.sort(np.argsort(-paths, 1, kind="stable")[:, : self.width], 1)


def kept_curve(target, drafter: Drafter, tree: TreePolicy, rows: int, recalibrate: bool = False) -> Curve:
    """The costs of rounds of this pair on this machine: read where they are kept, else measured and kept."""
    shape = [type(tree).__name__, tree.topk, sizes_of(tree)]
    who = identity(target, drafter, drafter.acceptance) | {"tree": shape, "rows": rows, "of": "load"}
    return _kept(who, lambda: measure_curve(target, drafter, tree, rows), recalibrate)


def _kept(who: dict, measure: Callable[[], tuple[Curve, bool | None]], recalibrate: bool = False) -> Curve:
    """The curve that is stored for `who`, else the measured one, which is stored unless the machine was busy (True) or
    other rounds were timed than asked for (None)."""
    measured = Kept("loads", who)
    if not recalibrate and (kept := measured.read(lambda entries: Curve.of(entries["curve"]))) is not None:
        return kept
    curve, busy = measure()
    if busy:
        print("note: the machine was busy, so the costs of rounds are rough, and not kept", file=sys.stderr)
    elif busy is not None:
        measured.write({"curve": curve.entries()})
    return curve


def measure_curve(target, drafter: Drafter, tree: TreePolicy, rows: int, repeats: int = REPEATS) -> tuple[Curve, bool]:
    """Times real rounds of 1, 2, 4, ... `rows` rows, of every depth and several numbers of nodes. The least of all
    turns counts: other programs only add time. Also returns whether they did, by plain rounds."""
    probe = Probe(sizes := sizes_of(tree))
    engine = Engine(target, drafter, tree, adaptive=probe, overlap=False, abstain=False)
    numbers = sorted({min(2**i, rows) for i in range(rows.bit_length() + 1)})
    turns = [*enumerate(sizes)] + [(tree.steps, n) for n in WIDTHS if 1 < n < sizes[-1]]
    levels, widths = np.array(turns).T
    rest, verify, busy = {}, {}, False
    for number in numbers:
        found = np.array([_time(engine, probe, number, turns) for _ in range(repeats)])
        plain, least = found[:, 0, 1], found.min(0)  # seconds [turns,2] without the target's forward, and of it
        busy = busy or plain.max() > BUSY * plain.min()
        rest[number] = [float(least[levels == depth, 0].min()) for depth in range(tree.steps + 1)]
        verify[number] = {n: float(least[widths == n, 1].min()) for n in set(widths.tolist())}
    return Curve(numbers, rest, verify), busy


@torch.inference_mode()
def _time(engine: Engine, probe: Probe, rows: int, turns: Sequence[tuple[int, int]]) -> list[tuple[float, float]]:
    """Seconds of all but the target's forward, and of that, for rounds of (levels, nodes) that are played in turn."""
    new = min((ROUNDS * len(turns) + 1) * engine.round.path + 1, engine.target.config.context - 2)
    length = max(1, min(CONTEXT, engine.target.config.context - new - 1))
    probe.levels = 0
    engine.reserve(rows, length + new, reads=Reads.TOKENS)
    add_rows(engine, rows, length, new)
    engine.step()
    clock, found = engine.loop.batch.clock, []
    for probe.levels, probe.width in turns:
        seconds = []
        for _ in range(ROUNDS):
            mark = clock.position - 1
            if engine.step() is None:
                break
            parts = clock.seconds(mark)
            forward = parts.pop("verify", 0.0)
            seconds.append((sum(parts.values()), forward))
        if len(seconds) < 2:
            raise ValueError(f"a context of {engine.target.config.context} tokens is too short to time rounds in")
        found.append(tuple(np.min(seconds[1:], 0)))
    return found


# Recorded rounds, timed as they are played


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
    probe = Probe(sizes_of(over_block(drafter, tree)), kind, cuts=kind == Survival.name)
    engine = Engine(target, drafter, tree, *given, adaptive=probe, **how)
    costs = None if engine.graphs is None else partial(kept_recorded_curve, engine, crowd)
    if not crowd.together:
        prepare(engine, crowd)
    engine.adaptive = make_policy(name, target, drafter, tree, rows=crowd.rows, costs=costs)
    return engine


def prepare(engine: Engine, crowd: Crowd) -> None:
    """Compile the rounds of greedy texts for every number of rows, if the engine compiles. Other rounds are compiled
    when they are first played. An adaptive policy must be a `Probe`."""
    if engine.graphs is None or not engine.graphs.backend.any_bound:
        return
    with crowd.begun(engine):
        for number in crowd.widths:
            _time_steps(engine, number, 1)
    engine.graphs.finish()


def levels_of(engine: Engine) -> list[int]:
    """The numbers of levels that recorded rounds may draft: all or none if they are compiled, which takes long."""
    return [*range(0, engine.policy.steps + 1, engine.policy.steps if engine.graphs.backend.any_bound else 1)]


def kept_recorded_curve(engine: Engine, crowd: Crowd) -> Curve:
    """The same of rounds as this engine records them."""
    tree, backend = engine.policy, engine.graphs.backend
    who = identity(engine.target, engine.drafter, engine.drafter.acceptance) | {"of": "recorded load"}
    who |= {"tree": [type(tree).__name__, tree.topk, engine.adaptive.sizes], "crowd": str(crowd)}
    who |= {"backend": [type(backend).__name__, getattr(backend, "compiles", True), ops.backends()]}
    return _kept(who, lambda: measure_recorded_curve(engine, crowd))


def measure_recorded_curve(engine: Engine, crowd: Crowd, repeats: int = REPEATS) -> tuple[Curve, bool | None]:
    """Times recorded rounds of 1, 2, 4, ... rows and of the levels that they may draft, with all that the host
    does for them. It is told as seconds beside the target's forward. Also returns whether the machine was busy, by
    plain rounds; None if some rounds were not compiled. The engine was prepared."""
    rest, busy, choices, numbers = {}, False, levels_of(engine), crowd.widths
    with crowd.begun(engine):
        for number in numbers:
            found = [_time_steps(engine, number, STEPS) for _ in range(repeats)]
            plain = [turn[0] for turn in found]
            busy = busy or max(plain) > BUSY * min(plain)
            rest[number] = np.interp(range(engine.policy.steps + 1), choices, np.min(found, 0)).tolist()
    verify = {number: dict.fromkeys(engine.adaptive.sizes, 0.0) for number in numbers}
    compiled = not any(graph.launched for graph in engine.graphs.batch.graphs.values())
    return Curve(numbers, rest, verify, only=choices, padded=True), busy if busy or compiled else None


def _time_steps(engine: Engine, rows: int, steps: int) -> list[float]:
    """Return the median seconds of a round of so many rows, of `steps` rounds or as many as there is room for. With a
    `Probe`, return one for each number of levels that rounds may draft."""
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
        added = add_rows(engine, rows, length, new)
        found.append(float(np.median(step_seconds(engine, count)[SETTLE:])))
        for sequence in added:
            engine.abort(sequence)
        while engine.step() is not None:
            pass
    return found
