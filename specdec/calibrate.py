"""Adaptive policies by name, and what they need: what rounds cost here at any load, and how often drafts are right.

Costs are measured once for a machine, a pair, a tree and a number of rows, in some seconds, and kept in the user's
cache folder. How often drafts are right says the drafter's acceptance.json, or a guess, until rounds have told.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from specdec.acceptance import Acceptance
from specdec.adaptive import NAMES, Curve, Draft, Ema, Fixed, Policy, Survival, Table
from specdec.adaptive.estimators import make_estimator
from specdec.auto import BUSY, identity
from specdec.cli.files import Kept
from specdec.contracts import Drafter, TreePolicy
from specdec.engine.engine import Engine
from specdec.engine.fits import over_block
from specdec.engine.graphs import widths_up_to
from specdec.engine.report import Reads
from specdec.types import Sampling
from trees.optimal import most_nodes, optimal_paths

HELP = "draft by the load: table, ema, survival"
GUESS = 0.6  # how often a level is accepted where the one before was, if nobody has measured it
CONTEXT = 128  # tokens before the rounds that are timed
ROUNDS = 3  # timed in a row, of which the first does not count
REPEATS = 3
SETTLE, STEPS = 2, 8  # recorded rounds of a kind in a row: so many do not count, and so many do
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
    kind, _, detail = name.partition(":")
    levels = len(sizes) - 1
    if kind not in NAMES or (detail and kind not in ("table", "survival")):
        raise ValueError(f"there is no adaptive policy {name!r}; there are {', '.join(NAMES)}")
    if kind == "fixed":
        return Fixed(levels)
    if kind == "table":
        return Table.parse(detail, levels) if detail else Table.measured(costs(), sizes, prior)
    if kind == "ema":
        return Ema(costs(), sizes, prior)
    estimator = make_estimator(detail or "calibrated", levels)
    return Survival(costs(), sizes, prior, estimator)


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
    """Plays the rounds that it is told to."""

    levels, width = 0, 0

    def __init__(self, sizes: Sequence[int], cuts: bool = True):
        """cuts: leaves out nodes, and not only levels."""
        self.sizes, self.cuts = sizes, cuts

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
    measured = Kept("loads", who)
    if not recalibrate and (kept := measured.read(lambda entries: Curve.of(entries["curve"]))) is not None:
        return kept
    curve, busy = measure_curve(target, drafter, tree, rows)
    if busy:
        print("note: the machine was busy, so the costs of rounds are rough, and not kept", file=sys.stderr)
        return curve
    measured.write({"curve": curve.entries()})
    return curve


def measure_curve(target, drafter: Drafter, tree: TreePolicy, rows: int, repeats: int = REPEATS) -> tuple[Curve, bool]:
    """Times real rounds of 1, 2, 4, ... `rows` rows, of every depth and several numbers of nodes. The least of all
    turns counts: other programs only add time. Also returns whether they did, by plain rounds."""
    sizes = sizes_of(tree)
    probe = Probe(sizes)
    engine = Engine(target, drafter, tree, adaptive=probe, overlap=False, abstain=False)
    numbers = sorted({min(2**i, rows) for i in range(rows.bit_length() + 1)})
    turns = [*enumerate(sizes)] + [(tree.steps, n) for n in WIDTHS if 1 < n < sizes[-1]]
    rest: dict[int, list[float]] = {}
    verify: dict[int, dict[int, float]] = {}
    busy = False
    for number in numbers:
        found = [_time(engine, probe, number, turns) for _ in range(repeats)]
        plain = [turn[0][1] for turn in found]
        busy = busy or max(plain) > BUSY * min(plain)
        least = [np.min([turn[i] for turn in found], 0) for i in range(len(turns))]
        rest[number] = [
            min(float(own[0]) for (levels, _), own in zip(turns, least, strict=True) if levels == depth)
            for depth in range(tree.steps + 1)
        ]
        verify[number] = {
            n: min(float(own[1]) for (_, width), own in zip(turns, least, strict=True) if width == n)
            for n in {width for _, width in turns}
        }
    return Curve(numbers, rest, verify), busy


@torch.inference_mode()
def _time(engine: Engine, probe: Probe, rows: int, turns: Sequence[tuple[int, int]]) -> list[tuple[float, float]]:
    """Seconds of all but the target's forward, and of that, for rounds of (levels, nodes) that are played in turn."""
    new = (ROUNDS * len(turns) + 1) * engine.round.path + 1
    new = min(new, engine.target.config.context - 2)
    length = max(1, min(CONTEXT, engine.target.config.context - new - 1))
    probe.levels = 0
    engine.reserve(rows, length + new, reads=Reads.TOKENS)
    for row in range(rows):
        prompt = [(7 * i + 3 + row) % engine.target.vocab for i in range(length)]
        engine.add(prompt, max_new_tokens=new, sampling=Sampling(), eos=frozenset())
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


# Recorded rounds


def adaptive_engine(
    name: str, target, drafter: Drafter, tree: TreePolicy, *given, rows: int, room: int, **how
) -> Engine:
    """An engine whose rounds follow the policy of this name, for `Engine.reserve(rows, room)`. given, how: as for
    `Engine`. Where rounds are recorded what they cost is measured with the engine itself."""
    kind = name.partition(":")[0]
    probe = Probe(sizes_of(over_block(drafter, tree)), cuts=kind == Survival.name)
    probe.name = kind
    engine = Engine(target, drafter, tree, *given, adaptive=probe, **how)
    costs = None if engine.graphs is None else partial(kept_recorded_curve, engine, rows, room)
    policy = make_policy(name, target, drafter, tree, rows=rows, costs=costs)
    prepare(engine, rows, room)
    engine.adaptive = policy
    return engine


def prepare(engine: Engine, rows: int, room: int) -> None:
    """Compile what `rows` sequences of up to `room` tokens are decoded with at temperature 0, whatever number of them,
    if the engine compiles. Other rounds are compiled as soon as they are played. An adaptive policy is a `Probe`."""
    if engine.graphs is None or not engine.graphs.backend.any_bound:
        return
    with crowd(engine, rows, room):
        for number in widths_up_to(rows):
            _time_steps(engine, number, 1)
    engine.graphs.finish()


@contextmanager
def crowd(engine: Engine, rows: int, room: int) -> Iterator[None]:
    """Room for so many sequences, of which nothing is kept."""
    prefixes, engine.prefixes = engine.prefixes, None
    engine.reserve(rows, room, reads=Reads.TOKENS)
    yield
    engine.prefixes = prefixes


def levels_of(engine: Engine) -> list[int]:
    """The numbers of levels that recorded rounds may draft. Compiled ones draft all or none, as each takes long to
    compile."""
    steps = engine.policy.steps
    return [0, steps] if engine.graphs.backend.any_bound else list(range(steps + 1))


def kept_recorded_curve(engine: Engine, rows: int, room: int) -> Curve:
    """The costs of rounds as this engine records them on this machine: read where they are kept, else measured and
    kept."""
    tree, sizes = engine.policy, engine.adaptive.sizes
    who = identity(engine.target, engine.drafter, engine.drafter.acceptance) | {"of": "recorded load"}
    who |= {"tree": [type(tree).__name__, tree.topk, sizes], "rows": rows, "room": room}
    measured = Kept("loads", who)
    if (kept := measured.read(lambda entries: Curve.of(entries["curve"]))) is not None:
        return kept
    curve, busy = measure_recorded_curve(engine, rows, room)
    if busy:
        print("note: the machine was busy, so the costs of rounds are rough, and not kept", file=sys.stderr)
        return curve
    measured.write({"curve": curve.entries()})
    return curve


def measure_recorded_curve(engine: Engine, rows: int, room: int, repeats: int = REPEATS) -> tuple[Curve, bool]:
    """Times recorded rounds of 1, 2, 4, ... `rows` rows and of the levels that they may draft, with all that the host
    does for them. It is told as seconds beside the target's forward. Also returns whether the machine was busy, by
    plain rounds."""
    prepare(engine, rows, room)
    rest, busy, choices, numbers = {}, False, levels_of(engine), widths_up_to(rows)
    with crowd(engine, rows, room):
        for number in numbers:
            found = [_time_steps(engine, number, STEPS) for _ in range(repeats)]
            plain = [turn[0] for turn in found]
            busy = busy or max(plain) > BUSY * min(plain)
            rest[number] = np.interp(range(engine.policy.steps + 1), choices, np.min(found, 0)).tolist()
    verify = {number: dict.fromkeys(engine.adaptive.sizes, 0.0) for number in numbers}
    return Curve(numbers, rest, verify, only=choices), busy


def _time_steps(engine: Engine, rows: int, steps: int) -> list[float]:
    """Seconds of a round of so many rows, of so many rounds the one in the middle. With a `Probe` for each number of
    levels that rounds may draft."""
    choices = [0] if engine.adaptive is None else levels_of(engine)
    new = min((SETTLE + steps) * len(choices) * engine.round.path + 1, engine.room - 2)
    length, added, found = max(1, min(CONTEXT, engine.room - new - 1)), [], []
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
            if report is None:
                raise ValueError(f"a room of {engine.room} tokens is too short to time rounds in")
            seconds += [] if report.prefill else [time.perf_counter() - begun]
        found.append(float(np.median(seconds[SETTLE:])))
    for sequence in added:
        engine.abort(sequence)
    while engine.step() is not None:
        pass
    return found
