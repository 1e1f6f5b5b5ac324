"""The tree that is fastest here, or none: from the drafter's measured acceptance and from what rounds cost.

`acceptance.json` beside a drafter says what every static tree would have had accepted (`specdec.acceptance`). What its
rounds cost is measured once for a machine, a pair and a number of rows, in some seconds, and kept in the user's
cache folder. First a few trees of different sizes and plain decoding are timed. A plane through their times predicts
all others:

    cost of a round = v(nodes) + a (levels - 1) + b (levels - 1) width        v: linear between the sizes timed

Then those that are predicted best are timed too. At last the `LAST` fastest of all that were timed take more turns with
plain decoding. The fastest of them is taken, and none unless it is faster than plain decoding by `MARGIN`. A machine
may be twice as slow a second later, so costs are told in plain rounds of the same turn. Of rows that are decoded
together the slowest counts: plain decoding takes as many rounds for each of them, and speculation does not.

Compiled rounds (docs/compile.md) have other costs, and each tree's take some 20 s to compile. So the trees that are
timed last are the `COMPILED` fastest of different depths then. They are compiled, and so is plain decoding.
"""

import hashlib
import json
import shlex
import statistics
import time
from collections import Counter, abc
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import torch

from specdec import __version__
from specdec.acceptance import Acceptance
from specdec.cli.files import Kept
from specdec.contracts import Drafter
from specdec.engine.engine import Engine
from specdec.engine.report import Reads
from specdec.engine.sequence import Sequence
from specdec.machine import machine
from specdec.structs import Sampling
from specdec.trees.optimal import most_nodes, optimal_paths, tree_of
from specdec.trees.spec import Tree, parse_tree, shape_of

NODES = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
SIZES = (2, 4, 8, 16, 32, 64)  # of the trees that are timed first
FINALISTS = 4
LAST, COMPILED = 2, 3
BUSY = 1.3  # slowest to fastest turn of plain decoding: above it the machine did something else too
MARGIN = 1.02  # plain decoding is taken unless a tree is expected to be faster than this
SECONDS, LAST_SECONDS = 1.5, 3.0  # for the first timing, about, and for the last
TURNS, LAST_TURNS = 3, 9
LONGEST, SHORTEST = 16, 3  # rounds of one run
TOKENS = 64  # of one run at last: a text's first rounds find less in the processor's caches, and plain ones more later
CONTEXT = 64  # tokens before the rounds that are timed


@dataclass(frozen=True)
class Candidate:
    """A tree, its tau by the drafter's measured acceptance (`AlongTexts.tau`, of the batch), and its shape."""

    tree: Tree | None  # None: plain decoding
    tau: float
    width: int  # nodes that are expanded on a level at most

    @property
    def shape(self) -> tuple[int, int, int]:
        """Nodes, levels, width."""
        return self.tree.num_draft_tokens, self.tree.steps, self.width


PLAIN = Candidate(None, 1.0, 0)


@dataclass(frozen=True)
class Choice:
    """What was chosen, and what is expected of it. tree None: plain decoding is the fastest."""

    tree: Tree | None
    tau: float
    speedup: float  # tokens/s to those of plain decoding; 1 if that was chosen
    plain_tokens_per_second: float  # of a row
    best: str = ""  # the best tree, where plain decoding was chosen
    best_speedup: float = 1.0
    busy: bool = False  # other programs disturbed the timing; such a choice is not kept

    def __str__(self) -> str:
        plain = f"plain decoding's {self.plain_tokens_per_second:.0f} tokens/s"
        if self.tree is None:
            other = f"--tree {shlex.quote(self.best)} would reach {self.best_speedup:.2f} of it"
            what = f"tree: none, as {plain} are the best here; {other}"
        else:
            tree = f"static {shape_of(self.tree)} ({self.tree})" if self.tree.fixed else self.tree
            what = f"tree: {tree}, the fastest here: tau {self.tau:.2f}, {self.speedup:.2f} times {plain} expected"
        return what + ("; the machine was busy, so this is rough and not kept" if self.busy else "")


Timer = Callable[[Tree | None, int], float]  # a tree (None: plain) and a number of rounds -> seconds a round


def choose_tree(
    target,
    drafter: Drafter,
    *,
    batch: int = 1,
    temperature: float = 0.0,
    compile: bool = False,
    recalibrate: bool = False,
) -> Choice:
    """The fastest tree for `batch` rows at this temperature, measured now or read where it was kept. compile: of
    compiled rounds.

    Raises ValueError for a drafter without measured acceptance, and where rounds cannot be compiled."""
    acceptance = drafter.acceptance
    if acceptance is None:
        raise ValueError(
            "this drafter has no acceptance.json, by which a tree could be chosen: write one with "
            "`specdec tree --keep`, or give --topk, --steps and --num-draft-tokens"
        )
    who = identity(target, drafter, acceptance) | {"batch": batch, "temperature": temperature, "compile": compile}
    measured = Kept("trees", who)

    def read(kept: dict) -> Choice:
        tree = kept["choice"]["tree"]
        return Choice(**kept["choice"] | {"tree": tree and parse_tree(tree)})

    if not recalibrate and (kept := measured.read(read)) is not None:
        return kept
    launched = _timer(target, drafter, batch, temperature)
    compiled = _timer(target, drafter, batch, temperature, compile=True) if compile else None
    chains = target.chains_only or drafter.chains_only
    choice = choose(candidates(acceptance, drafter, temperature, batch, chains), launched, compiled)
    if not choice.busy:
        measured.write({"choice": asdict(choice) | {"tree": choice.tree and str(choice.tree)}})
    return choice


def candidates(
    acceptance: Acceptance, drafter: Drafter, temperature: float, batch: int = 1, chains: bool = False
) -> list[Candidate]:
    """Of every depth and size the static tree that accepts the most, chains among them. chains: these only."""
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
                found[tree] = Candidate(tree, acceptance.tau(paths, temperature, batch), _width(paths))
    return list(found.values())


def _width(paths: abc.Sequence[abc.Sequence[int]]) -> int:
    """How many nodes of a level below the root's are expanded at most; 0 for a tree of one level."""
    inner = {tuple(path[:-1]) for path in paths if len(path) > 1}
    return max(Counter(map(len, inner)).values(), default=0)


def choose(all_trees: abc.Sequence[Candidate], seconds_of: Timer, compiled: Timer | None = None) -> Choice:
    """The fastest tree of those that are timed last, or none. compiled: times compiled rounds, if they are to be the
    fastest."""
    once = seconds_of(PLAIN.tree, SHORTEST)
    costs, busy = _first_costs(all_trees, seconds_of, once)
    ranking = sorted(costs, key=lambda c: -c.tau / costs[c])
    last = ranking[:LAST] if compiled is None else _of_different_depths(ranking)
    tokens = _fitting(LAST_SECONDS, once * (1 + sum(costs[c] / c.tau for c in last)) * LAST_TURNS, TOKENS)
    costs, plain = _time(last, compiled or seconds_of, lambda c: max(SHORTEST, round(tokens / c.tau)), LAST_TURNS)
    best, rate = max(costs, key=lambda c: c.tau / costs[c]), 1 / statistics.median(plain)
    speedup = best.tau / costs[best]
    if speedup < MARGIN:
        return Choice(None, 1.0, 1.0, rate, str(best.tree), speedup, busy)
    return Choice(best.tree, best.tau, speedup, rate, busy=busy)


def _first_costs(
    all_trees: abc.Sequence[Candidate], seconds_of: Timer, once: float
) -> tuple[dict[Candidate, float], bool]:
    """Costs of a few trees of all sizes and of those predicted best by them, and whether the machine was busy.

    once: seconds of a plain round, about."""
    best_of_size = [
        max((c for c in all_trees if c.tree.num_draft_tokens == size), key=lambda c: c.tau, default=None)
        for size in SIZES
    ]
    chains = [c for c in all_trees if c.tree.topk == 1 and c.tree.num_draft_tokens in (3, 5)]
    probes = list(dict.fromkeys(c for c in (*best_of_size, *chains) if c is not None))
    rounds = _fitting(SECONDS, once * 2 * (len(probes) + FINALISTS + 2) * TURNS, LONGEST)
    costs, plain = _time(probes, seconds_of, lambda _: rounds, TURNS)
    predict = _plane([(c.shape, costs[c]) for c in probes])
    others = sorted((c for c in all_trees if c not in costs), key=lambda c: -c.tau / predict(c.shape))
    more, _ = _time(others[:FINALISTS], seconds_of, lambda _: rounds, TURNS)
    return costs | more, max(plain) > BUSY * min(plain)


def _fitting(seconds: float, one: float, most: int) -> int:
    """How many to time in so many seconds, if one takes `one`."""
    return int(np.clip(seconds / one, SHORTEST, most))


def _of_different_depths(ranking: abc.Sequence[Candidate]) -> list[Candidate]:
    """The first tree of each depth, and of these the first few."""
    found: dict[int, Candidate] = {}
    for c in ranking:
        found.setdefault(c.tree.steps, c)
    return list(found.values())[:COMPILED]


def _time(
    trees: abc.Sequence[Candidate], seconds_of: Timer, rounds: Callable[[Candidate], int], turns: int
) -> tuple[dict[Candidate, float], list[float]]:
    """How many plain rounds a round of each tree takes, the median of all turns; and by turn a plain round's seconds.

    Every other turn goes backwards: what a machine does in a turn then hits all alike."""
    plain, costs = [], {c: [] for c in trees}
    for turn in range(turns):
        order = [PLAIN, *trees]
        taken = {c: seconds_of(c.tree, rounds(c)) for c in (order if turn % 2 == 0 else reversed(order))}
        plain.append(taken.pop(PLAIN))
        for c, seconds in taken.items():
            costs[c].append(seconds / plain[-1])
    return {c: statistics.median(found) for c, found in costs.items()}, plain


def _plane(points: abc.Sequence[tuple[tuple[int, int, int], float]]) -> Callable[[tuple[int, int, int]], float]:
    """The cost of a round by shape: the formula at the top, by least squares on relative errors."""
    sizes = sorted({nodes for (nodes, _, _), _ in points if nodes in SIZES})

    def features(shape: tuple[int, int, int]) -> np.ndarray:
        nodes, levels, width = shape
        v = [np.interp(nodes, sizes, row) for row in np.eye(len(sizes))]
        return np.array([*v, levels - 1, (levels - 1) * width])

    costs = np.array([cost for _, cost in points])
    rows = np.stack([features(shape) for shape, _ in points])
    # Few points leave some coefficients open: the least change from "a level costs a tenth of the smallest round" then.
    guess = np.concatenate([np.full(len(sizes), costs.min()), [costs.min() / 10, 0.0]])
    change = np.linalg.lstsq(rows / costs[:, None], 1 - rows @ guess / costs, rcond=None)[0]
    weights = guess + change
    return lambda shape: max(float(features(shape) @ weights), costs.min() / 2)


def _timer(target, drafter: Drafter, batch: int, temperature: float, compile: bool = False) -> Timer:
    """Times real rounds of an engine for each tree."""
    engines: dict[Tree | None, Engine] = {}
    sampling = Sampling(temperature)

    def seconds_of(tree: Tree | None, rounds: int) -> float:
        if tree not in engines:
            pieces = () if tree is None else (drafter, tree)
            engines[tree] = Engine(target, *pieces, abstain=False, compile=compile)
            _rounds(engines[tree], batch, 2, sampling)  # the first rounds find memory and code
        return _rounds(engines[tree], batch, rounds, sampling)

    return seconds_of


def _rounds(engine: Engine, batch: int, rounds: int, sampling: Sampling) -> float:
    """Seconds a round of `batch` rows behind a context of CONTEXT tokens, or as many as fit."""
    new = (rounds + 3) * engine.round.path + 1
    length = max(1, min(CONTEXT, engine.target.config.context - new - 1))
    engine.reserve(batch, length + new, reads=Reads.TOKENS)
    add_rows(engine, batch, length, new, sampling)
    return statistics.mean(step_seconds(engine, rounds + 1)[1:])


def add_rows(engine: Engine, rows: int, length: int, new: int, sampling: Sampling | None = None) -> list[Sequence]:
    """Add sequences of `length` tokens that end after `new` more."""
    # As `generate` would, so that its compiled rounds are these: as many tokens may end a text, but none of them comes.
    how = {"max_new_tokens": new, "sampling": sampling, "eos": frozenset(range(-len(engine.target.eos), 0))}
    texts = [[(7 * i + 3 + row) % engine.target.vocab for i in range(length)] for row in range(rows)]
    return [engine.add(text, **how) for text in texts]


def step_seconds(engine: Engine, rounds: int) -> list[float]:
    """Seconds of the next rounds of an engine, each of which has rows; prefills are not timed."""
    found: list[float] = []
    while len(found) < rounds:
        begun = time.perf_counter()
        report = engine.step()
        found += [] if report.prefill else [time.perf_counter() - begun]
    return found


def identity(target, drafter: Drafter, acceptance: Acceptance | None) -> dict:
    """What a choice depends on, settings apart."""
    shapes = [
        (key, list(value.shape), str(value.dtype))
        for module in (target, drafter)
        if isinstance(module, torch.nn.Module)
        for key, value in module.state_dict().items()
    ]
    pair = [type(drafter).__name__, dict(drafter.conventions), shapes, acceptance and acceptance.as_text()]
    return {
        "machine": machine(target.device),
        "torch": torch.__version__,
        "specdec": __version__,
        "pair": hashlib.sha256(json.dumps(pair, default=str).encode()).hexdigest(),
    }
