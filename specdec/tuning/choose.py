"""Choose the fastest tree, or none: from the drafter's measured acceptance and the costs of rounds.

A drafter's `acceptance.json` gives the acceptance that every static tree would have had (`specdec.acceptance`). First a
few trees of different sizes and plain decoding are timed, and the costs of all other trees follow (`Costs`). Then those
that are predicted best are timed too. At last the `LAST` fastest of all that were timed take more turns with plain
decoding. The fastest of them is taken, and none unless it is faster than plain decoding by `MARGIN`. A machine may be
twice as slow a second later, so costs are measured in plain rounds of the same turn. Of rows that are decoded together
the slowest counts: plain decoding takes as many rounds for each of them, and speculation does not.

Compiled rounds (docs/compile.md) have other costs, and each tree's take some 20 s to compile. So the trees that are
timed last are the `COMPILED` fastest of different depths then. They are compiled, and so is plain decoding.
"""

import shlex
import statistics
import sys
import time
from collections import abc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from specdec.acceptance import Acceptance
from specdec.cli.files import CachedJson
from specdec.contracts import Drafter
from specdec.structs import Sampling
from specdec.threads import Threads
from specdec.trees import Tree
from specdec.trees.optimal import most_nodes, optimal_paths, tree_of
from specdec.trees.spec import parse_tree, shape_of
from specdec.tuning.costs import Costs, Kind, Point, identity
from specdec.tuning.timing import Seconds, TreeTimer, busy, in_turns

NODES = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
SIZES = (2, 4, 8, 16, 32, 64)  # of the trees that are timed first
FINALISTS = 4
LAST, COMPILED = 2, 3
MARGIN = 1.02  # plain decoding is taken unless a tree is expected to be faster than this
SECONDS, LAST_SECONDS = 1.5, 3.0  # for the first timing, about, and for the last
TURNS, LAST_TURNS = 3, 9
LONGEST, SHORTEST = 16, 3  # rounds of one run
OCCUPIED, LOOK = 0.5, 0.3  # cores that other programs use, above which nothing is timed; seconds of the first look
TOKENS = 64  # of one run at last: a text's first rounds find less in the processor's caches, and plain ones more later


@dataclass(frozen=True)
class Candidate:
    """A tree, and its tau by the drafter's measured acceptance (`AlongTexts.tau`, of the batch)."""

    tree: Tree
    tau: float
    kind: Kind


@dataclass(frozen=True)
class Choice:
    """The chosen tree, and its expected speed. tree None: plain decoding is the fastest."""

    tree: Tree | None
    tau: float
    speedup: float  # tokens/s to those of plain decoding; 1 if that was chosen
    plain_tokens_per_second: float  # of a row
    best: str = ""  # the best tree, where plain decoding was chosen
    best_speedup: float = 1.0
    busy: bool = False  # other programs disturbed the timing, or prevented most of it; such a choice is not cached

    def __str__(self) -> str:
        """Return the line that a command prints about the choice."""
        plain = f"plain decoding's {self.plain_tokens_per_second:.0f} tokens/s"
        if self.tree is None:
            other = f"--tree {shlex.quote(self.best)} would reach {self.best_speedup:.2f} of it"
            what = f"tree: none, as {plain} are the best here; {other}"
        else:
            tree = f"static {shape_of(self.tree)} ({self.tree})" if self.tree.fixed else self.tree
            what = f"tree: {tree}, the fastest here: tau {self.tau:.2f}, {self.speedup:.2f} times {plain} expected"
        return what + ("; the machine was busy, so this is rough and not cached" if self.busy else "")


Timer = Callable[[Tree | None, int], Seconds]  # a tree (None: plain) and a number of rounds -> means of a round


def choose_tree(
    target,
    drafter: Drafter,
    *,
    batch: int = 1,
    temperature: float = 0.0,
    compile: bool = False,
    recalibrate: bool = False,
) -> Choice:
    """Return the fastest tree for `batch` rows at this temperature, measured now or read from the cache.

    compile: for compiled rounds.

    Raises ValueError for a drafter without measured acceptance, and where rounds cannot be compiled.
    """
    acceptance = drafter.acceptance
    if acceptance is None:
        raise ValueError(
            "this drafter has no acceptance.json, by which a tree could be chosen: write one with "
            "`specdec tune tree --keep`, or give --topk, --steps and --num-draft-tokens"
        )
    how = {"batch": batch, "temperature": temperature, "compile": compile, "acceptance": acceptance.as_text()}
    place = CachedJson("tuning", identity(target, drafter, **how))

    def read(stored: dict) -> Choice:
        tree = stored["choice"]["tree"]
        return Choice(**stored["choice"] | {"tree": tree and parse_tree(tree)})

    if not recalibrate and (stored := place.read(read)) is not None:
        return stored

    print("measuring which tree is fastest on this machine, once for this pair ...", file=sys.stderr, flush=True)

    def timer(compile: bool) -> Timer:
        own = TreeTimer(target, drafter, Sampling(temperature), abstain=False, compile=compile)
        return lambda tree, rounds: tuple(np.mean(own.seconds(tree, batch, rounds), 0))

    trees = candidates(acceptance, drafter, temperature, batch, target.chains_only or drafter.chains_only)
    choice = choose(trees, timer(False), timer(True) if compile else None)
    if not choice.busy:
        place.write({"choice": asdict(choice) | {"tree": choice.tree and str(choice.tree)}})
    return choice


def candidates(
    acceptance: Acceptance, drafter: Drafter, temperature: float, batch: int = 1, chains: bool = False
) -> list[Candidate]:
    """Return, of every depth and size, the static tree that accepts the most, chains among them. chains: these only."""
    along = acceptance.nearest(temperature)
    table = along.table()[: drafter.deepest(along.steps)]
    found: dict[Tree, Candidate] = {}
    for steps in range(1, len(table) + 1):
        most = most_nodes(along.topk, steps)
        sizes = [] if chains else [nodes for nodes in NODES if nodes <= most]
        shapes = [optimal_paths(table[:steps], nodes) for nodes in sizes]
        shapes.append([(0,) * depth for depth in range(1, steps + 1)])
        for paths in shapes:
            tree = tree_of(paths)
            if tree not in found:
                found[tree] = Candidate(tree, acceptance.tau(paths, temperature, batch), Kind.of(tree))
    return list(found.values())


def choose(all_trees: abc.Sequence[Candidate], seconds_of: Timer, compiled: Timer | None = None) -> Choice:
    """Return the fastest tree of those that are timed last, or none.

    Next to other programs little is timed, as that takes long and is rough: a chain of 3 is taken unless it is slower.

    compiled: times compiled rounds, if they are to be the fastest.
    """
    others = Threads(on=True)
    begun = others.load()  # the engine that is timed looks too, at shorter intervals
    once = sum(seconds_of(None, SHORTEST))
    while time.monotonic() < begun[0] + LOOK:
        once = sum(seconds_of(None, SHORTEST))
    if others.occupied_since(begun) > OCCUPIED:
        chain = max((c for c in all_trees if c.tree.topk == 1 and c.kind.nodes <= 4), key=lambda c: c.kind.nodes)
        return _fastest(*_time([chain], seconds_of, lambda _: SHORTEST, TURNS), least=1, busy=True)
    costs, disturbed = _first_costs(all_trees, seconds_of, once)
    ranking = sorted(costs, key=lambda c: -c.tau / sum(costs[c]))
    last = ranking[:LAST] if compiled is None else _of_different_depths(ranking)
    tokens = _fitting(LAST_SECONDS, once * (1 + sum(sum(costs[c]) / c.tau for c in last)) * LAST_TURNS, TOKENS)
    timed, plain = _time(last, compiled or seconds_of, lambda tau: max(SHORTEST, round(tokens / tau)), LAST_TURNS)
    disturbed = disturbed or others.occupied_since(begun) > OCCUPIED
    return _fastest(timed, plain, MARGIN, disturbed)


def _fastest(timed: dict[Candidate, Seconds], plain: list[float], least: float, busy: bool) -> Choice:
    """Return the fastest of the timed trees, or none if it is not `least` times as fast as plain decoding."""
    speedups = {c: c.tau / sum(parts) for c, parts in timed.items()}
    best, rate = max(speedups, key=speedups.__getitem__), 1 / statistics.median(plain)
    if speedups[best] < least:
        return Choice(None, 1.0, 1.0, rate, str(best.tree), speedups[best], busy)
    return Choice(best.tree, best.tau, speedups[best], rate, busy=busy)


def _first_costs(
    all_trees: abc.Sequence[Candidate], seconds_of: Timer, once: float
) -> tuple[dict[Candidate, Seconds], bool]:
    """Return costs of a few trees of all sizes and of those predicted best by them, and whether the machine was busy.

    once: approximate seconds of a plain round.
    """
    best_of_size = [
        max((c for c in all_trees if c.kind.nodes == size), key=lambda c: c.tau, default=None) for size in SIZES
    ]
    chains = [c for c in all_trees if c.tree.topk == 1 and c.kind.nodes in (3, 5)]
    probes = list(dict.fromkeys(c for c in (*best_of_size, *chains) if c is not None))
    rounds = _fitting(SECONDS, once * 2 * (len(probes) + FINALISTS + 2) * TURNS, LONGEST)
    timed, plain = _time(probes, seconds_of, lambda _: rounds, TURNS)
    costs = Costs(Point(c.kind, 1, 0.0, *timed[c]) for c in probes)
    others = sorted((c for c in all_trees if c not in timed), key=lambda c: -c.tau / costs.seconds(c.kind))
    more, _ = _time(others[:FINALISTS], seconds_of, lambda _: rounds, TURNS)
    return timed | more, busy(plain)


def _fitting(seconds: float, one: float, most: int) -> int:
    """Return how many to time in so many seconds, if one takes `one`."""
    return int(np.clip(seconds / one, SHORTEST, most))


def _of_different_depths(ranking: abc.Sequence[Candidate]) -> list[Candidate]:
    """Return the first tree of each depth, and of these the first few."""
    found: dict[int, Candidate] = {}
    for c in ranking:
        found.setdefault(c.kind.levels, c)
    return list(found.values())[:COMPILED]


def _time(
    trees: abc.Sequence[Candidate], seconds_of: Timer, rounds: Callable[[float], int], turns: int
) -> tuple[dict[Candidate, Seconds], list[float]]:
    """Return the parts of each tree's round, in plain rounds of the same turn, and a plain round's seconds by turn.

    The parts are the median of all turns. rounds: how many to time, by tau.
    """
    runs = [partial(seconds_of, None, rounds(1.0)), *(partial(seconds_of, c.tree, rounds(c.tau)) for c in trees)]
    plain, *found = (np.array(run) for run in in_turns(runs, turns))
    own = plain.sum(1)
    return {c: tuple(np.median(run / own[:, None], 0)) for c, run in zip(trees, found, strict=True)}, own.tolist()
