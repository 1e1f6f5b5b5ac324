"""Adaptive policies by name, the costs that they start from, and the engines that follow them."""

import re
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from typing_extensions import override

from specdec import ops, own
from specdec.acceptance import Acceptance
from specdec.contracts import Drafter, TreePolicy
from specdec.engine.adaptive import Draft, Fixed, Policy
from specdec.engine.engine import Engine
from specdec.engine.graphs import widths_up_to
from specdec.engine.report import Reads
from specdec.trees import Chain
from specdec.trees.optimal import most_nodes, optimal_paths
from specdec.tuning.costs import PLAIN, Costs, Kind, Point, cached_costs, identity, measure
from specdec.tuning.policy import Bandit, Rates
from specdec.tuning.survival import Survival, make_estimator
from specdec.tuning.timing import CONTEXT, median, room_for, time_rounds


class Table(Policy):
    """Draft length by the number of rows, as vLLM's `num_speculative_tokens_per_batch_size`."""

    name = "table"

    def __init__(self, levels: Mapping[int, int]):
        """levels: from this number of rows on, this many. The smallest number also applies to fewer rows."""
        self.starts = sorted(levels)
        self.depths = [levels[start] for start in self.starts]

    @classmethod
    def parse(cls, text: str, deepest: int) -> "Table":
        """Return the table of a text such as 1=5,8=3,32=0. Raises ValueError for others, and for too many levels."""
        if not re.fullmatch(r"\d+=\d+(,\d+=\d+)*", text):
            raise ValueError(f"a table of draft lengths is written ROWS=LEVELS,..., such as 1=5,8=3,32=0, not {text!r}")
        levels = {int(rows): int(depth) for rows, depth in (part.split("=") for part in text.split(","))}
        if max(levels.values()) > deepest:
            raise ValueError(f"the table asks for {max(levels.values())} levels, and the tree has {deepest}")
        return cls(levels)

    @classmethod
    def measured(cls, costs: Costs, kinds: Sequence[Kind], prior: Sequence[float]) -> "Table":
        """Return the table of the fastest levels by measured costs. kinds, prior: as for `Bandit`."""
        tokens = Rates(prior).tokens()

        def best(rows: int) -> int:
            return max(costs.choices, key=lambda depth: tokens[depth] / costs.seconds(kinds[depth], rows))

        return cls({rows: best(rows) for rows in costs.rows})

    @override
    def plan(self, rows: int) -> int:
        return self.depths[max(bisect_right(self.starts, rows) - 1, 0)]

    def __str__(self) -> str:
        """Return the text that `parse` reads."""
        return ",".join(f"{rows}={depth}" for rows, depth in zip(self.starts, self.depths, strict=True))


NAMES = (Fixed.name, Table.name, Bandit.name, Survival.name)
CHAIN, POLICY = Chain(3), Bandit.name  # the default on a CPU where no tree can be chosen: more nodes cost time there
GUESS = 0.6  # how often a level is accepted if the one before was, without measurements
ROUNDS, REPEATS = 6, 3  # timed rounds of a kind in a turn, and turns
WIDTHS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # nodes that cut trees are timed with


def make_policy(name: str, costs: Callable[[], Costs], kinds: Sequence[Kind], prior: Sequence[float]) -> Policy:
    """Return the policy `fixed`, `ema`, `table`, `table:1=5,8=3,32=0`, `survival`, or `survival:told` (an estimator).

    costs: called only if the policy depends on costs. kinds, prior: as for `Bandit`.

    Raises ValueError if there is no such policy.
    """
    kind, detail = parts_of(name)
    levels = len(kinds) - 1
    if kind == Fixed.name:
        return Fixed(levels)
    if kind == Table.name:
        return Table.parse(detail, levels) if detail else Table.measured(costs(), kinds, prior)
    if kind == Bandit.name:
        return Bandit(costs(), kinds, prior)
    estimator = make_estimator(detail or "calibrated", levels)
    return Survival(costs(), kinds, prior, estimator)


def parts_of(name: str) -> tuple[str, str]:
    """Return a policy's name and the detail after the colon. Raises ValueError for an unknown policy."""
    kind, _, detail = name.partition(":")
    if kind not in NAMES or (detail and kind not in (Table.name, Survival.name)):
        raise ValueError(f"there is no adaptive policy {name!r}; there are {', '.join(NAMES)}")
    return kind, detail


def kinds_of(tree: TreePolicy) -> list[Kind]:
    """Return the kinds of rounds that draft 0, 1, ... D levels."""
    return [PLAIN, *(Kind.of(tree.smaller(steps)) for steps in range(1, tree.steps + 1))]


def first_rates(acceptance: Acceptance | None, tree: TreePolicy, temperature: float) -> list[float]:
    """Return for each level how often it is accepted if the previous one was, in the trees that accept the most."""
    if acceptance is None:
        return [GUESS] * tree.steps
    table, taus = acceptance.nearest(temperature).table(), [1.0]
    table = [row[: tree.topk] for row in table]
    for steps, kind in enumerate(kinds_of(tree)[1:], 1):
        if steps <= len(table):
            nodes = min(kind.nodes, most_nodes(len(table[0]), steps))
            taus.append(acceptance.tau(optimal_paths(table[:steps], nodes), temperature))
        else:  # extrapolate from the last measured level
            taus.append(taus[-1] + max(taus[-1] - taus[-2], 0.0) * GUESS)
    reach = np.maximum(np.diff(taus), 0.01)
    return np.clip(reach / np.concatenate([[1.0], reach[:-1]]), 0.05, 0.99).tolist()


class Probe(Policy):
    """Drafts the levels and verifies the nodes of one kind of round, while rounds are timed."""

    kind, cuts = PLAIN, False

    def __init__(self, name: str, cuts: bool):
        """Stand for the policy of this name. cuts: that policy may leave out nodes of a draft."""
        self.name, self.cuts = name, cuts

    def set(self, kind: Kind) -> None:
        """Draft and verify this kind of round from now on."""
        self.kind = kind

    @override
    def plan(self, rows: int) -> int:
        return self.kind.levels

    @override
    def looks(self) -> bool:
        return self.kind.cut

    @override
    def keep(self, draft: Draft) -> np.ndarray:
        paths = (draft.ancestors * draft.edges[:, None]).sum(-1)
        return np.sort(np.argsort(-paths, 1, kind="stable")[:, : self.kind.nodes], 1)


@dataclass(frozen=True)
class Workload:
    """The sequences that an engine is prepared for."""

    rows: int
    room: int | None = None  # tokens of each; None: as many as it takes to time rounds
    reads: Reads = Reads.TOKENS
    together: bool = False  # they begin together, so every captured or compiled round has all rows

    @contextmanager
    def begun(self, engine: Engine, turns: int = 1) -> Iterator[None]:
        """Reserve room for the sequences in the engine, which stores no prompts meanwhile."""
        before = engine.prefixes, engine.compact
        engine.prefixes, engine.compact = None, engine.compact and not (self.together and engine.graphs is not None)
        try:
            engine.reserve(self.rows, self.room or room_for(engine, ROUNDS, turns), reads=self.reads)
            yield
        finally:
            engine.prefixes, engine.compact = before

    def widths(self, engine: Engine) -> list[int]:
        """Return the numbers of rows that rounds are timed for."""
        return [self.rows] if self.together and engine.graphs is not None else widths_up_to(self.rows)


def adaptive_engine(
    name: str,
    workload: Workload,
    target,
    drafter: Drafter,
    tree: TreePolicy,
    *given,
    temperature: float = 0.0,
    recalibrate: bool = False,
    **how,
) -> Engine:
    """Return an engine whose rounds follow the policy of this name (`make_policy`), with `tree` as the largest tree.

    The rounds that the engine plays later are timed with the engine itself. If sequences come and go, they are
    compiled first. The other arguments are those of `Engine`.

    temperature: of the acceptance that the policy starts from.
    recalibrate: measure costs even if they are cached.
    """
    kind, _ = parts_of(name)
    engine = Engine(target, drafter, tree, *given, adaptive=Probe(kind, cuts=kind == Survival.name), **how)
    if not workload.together:
        prepare(engine, workload)
    costs, tree = partial(engine_costs, engine, workload, recalibrate), engine.policy  # of no more levels than a block
    engine.adaptive = make_policy(name, costs, kinds_of(tree), first_rates(drafter.acceptance, tree, temperature))
    return engine


def prepare(engine: Engine, workload: Workload) -> None:
    """Compile the rounds of greedy texts for every number of rows, if the engine compiles.

    Other rounds are compiled when they are first played. An adaptive policy must be a `Probe`.
    """
    if engine.graphs is None or not engine.graphs.executor.any_bound:
        return
    with workload.begun(engine):
        for number in workload.widths(engine):
            time_rounds(engine, number, 1, _turns(engine, timed_kinds(engine)))
    engine.graphs.finish()


def timed_kinds(engine: Engine) -> list[Kind]:
    """Return the kinds of rounds to time: every depth, and several numbers of nodes if the policy cuts.

    Compilation takes long, so of compiled rounds only the whole tree and none are timed.
    """
    kinds = kinds_of(engine.policy)
    if engine.graphs is not None:
        return kinds[:: len(kinds) - 1] if engine.graphs.executor.any_bound else kinds
    whole = kinds[-1]
    cuts = engine.adaptive is not None and engine.adaptive.cuts
    return kinds + [whole._replace(nodes=n, cut=True) for n in WIDTHS if cuts and n < whole.nodes]


def _turns(engine: Engine, kinds: Sequence[Kind]) -> list[Callable[[], None]]:
    probe: Any = engine.adaptive  # a `Probe`
    return [lambda: None] if probe is None else [partial(probe.set, kind) for kind in kinds]


def engine_costs(engine: Engine, workload: Workload, recalibrate: bool = False) -> Costs:
    """Return the costs of this engine's rounds: cached ones, else measured ones."""
    executor = engine.graphs and engine.graphs.executor
    recorded = [type(executor).__name__, getattr(executor, "compiles", True), ops.backends()]
    kinds = [type(engine.policy).__name__, engine.policy.topk, timed_kinds(engine)]
    rules = [str(engine.verifier), own.digest(engine.verifier), own.digest(engine.policy)]
    how: dict[str, Any] = {"kinds": kinds, "workload": str(workload), "recorded": recorded, "rules": rules}
    who = identity(engine.target, engine.drafter, **how)
    return cached_costs(who, lambda: measure_engine(engine, workload), recalibrate)


def measure_engine(engine: Engine, workload: Workload) -> tuple[Costs, bool]:
    """Time rounds of 1, 2, 4, ... rows, with everything that the host does for them.

    Also return whether to cache them: not if the machine was busy, or if some rounds were not compiled yet.
    """
    kinds = timed_kinds(engine)
    turns = _turns(engine, kinds)

    def run(rows: int) -> list[Point]:
        found = time_rounds(engine, rows, ROUNDS, turns)
        return [Point(kind, rows, CONTEXT, *median(s)) for kind, s in zip(kinds, found, strict=True)]

    with workload.begun(engine, len(kinds)):
        points, busy = measure([partial(run, rows) for rows in workload.widths(engine)], REPEATS)
    batch = None if engine.graphs is None else engine.graphs.batch
    eager = batch is not None and any(graph.eager for graph in batch.graphs.values())
    if busy:
        print("note: the machine was busy, so the costs of rounds are rough, and not cached", file=sys.stderr)
    return Costs(points, padded=engine.graphs is not None), not (busy or eager)
