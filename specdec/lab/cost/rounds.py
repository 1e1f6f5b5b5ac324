"""Real rounds of the engine, timed part by part.

The engine marks the parts itself. No part is timed alone in a loop, where caches are warmer than in decoding.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, product

from specdec.engine.engine import Engine
from specdec.engine.report import Observer, Reads, RoundReport
from specdec.structs import Sampling
from specdec.trees import Chain, DynamicTree, Tree

PARTS = ("grow", "verify", "commit", "extend", "host")
WIDTHS = (1, 2, 4, 8)
DEPTHS = (1, 2, 4, 8)
NODES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
CONTEXTS = (32, 128, 384)
NEW_TOKENS = 16  # of one run: some rounds after the first, which is left out
# Settings of an engine whose rounds are timed. A CUDA graph does not separate the parts of a round. A batch that keeps
# the rows that have ended costs the same in every round, and so does one whose drafter may not abstain.
TIMED = {"graphs": False, "compact": False, "abstain": False}


@dataclass(frozen=True)
class RoundCost:
    """Median seconds of the rounds of one tree (None: plain decoding) at one context and batch size."""

    tree: Tree | None
    context: float  # tokens before the round, on average
    batch: int
    seconds: dict[str, float]  # by part, as PARTS names them; of plain decoding verify and host only


def useful_trees(topks: Sequence[int], steps: int, nodes: Sequence[int]) -> list[Tree]:
    """Every chain and dynamic tree of these topks, 1 to `steps` levels and these numbers of nodes.

    Trees of fewer nodes than levels + 1 are left out: their deepest levels would be drafted in vain."""
    crossed = product(sorted(set(topks)), range(1, steps + 1), sorted(set(nodes)))
    found = [
        Chain(d) if k == 1 else DynamicTree(k, d, n)
        for k, d, n in crossed
        if k == 1 or d + 1 <= n <= DynamicTree.candidates(k, d) + 1
    ]
    return list(dict.fromkeys(found))


def probes(topks: Sequence[int], steps: int, nodes: Sequence[int]) -> list[Tree]:
    """The trees that are timed: of `useful_trees` every topk, few depths, and every number of nodes several times."""
    depths = sorted({min(depth, steps) for depth in (*DEPTHS, steps)})
    chosen, turn = [], 0
    for topk in sorted(set(topks)):
        for depth in depths:
            here = [t for t in useful_trees([topk], depth, nodes) if t.steps == depth]
            picked = here[turn % 3 :: 3] or here[-1:]
            chosen += sorted({*picked, *here[-1:]})
            turn += 1
    return chosen


class _RoundWatch(Observer):
    """An observer of the engine that keeps its clock, and the longest row's tokens before each round."""

    reads = Reads.TOKENS

    def __init__(self) -> None:
        self.contexts: list[int] = []

    def __call__(self, report: RoundReport) -> None:
        self.clock = report.clock
        if report.prefill:
            self.rows = report.rows  # a later report leaves out the rows that have ended
        self.contexts.append(max(row.committed for row in self.rows))


def time_rounds(engine: Engine, prompts: list[list[int]], new: int, sampling: Sampling) -> list[tuple[int, dict]]:
    """Decode `new` tokens of each prompt. Returns context and seconds by part of every round but the first."""
    watch = _RoundWatch()
    engine.generate(prompts, max_new_tokens=new, sampling=sampling, eos=frozenset(), observer=watch)
    marks = [list(group) for shown, group in groupby(watch.clock.intervals(), lambda m: m[0] == "output") if not shown]
    found = []
    for context, parts in list(zip(watch.contexts, marks[1:], strict=False))[1:]:
        names = ("verify", "host") if engine.drafter is None else PARTS
        found.append((context, dict(zip(names, (seconds for _, seconds in parts), strict=True))))
    return found


def measure_rounds(
    target,
    drafter,
    text: list[int],
    *,
    topks: Sequence[int] = WIDTHS,
    steps: int = 8,
    nodes: Sequence[int] = NODES,
    contexts: Sequence[int] = CONTEXTS,
    batches: Sequence[int] = (1,),
    statics: Sequence[Tree] = (),
    sampling: Sampling | None = None,
    repeats: int = 5,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> list[RoundCost]:
    """Time real rounds of the probes, which take turns, and return the medians over `repeats` turns.

    All probes are timed at the middle context. Those of one level and the deepest are timed at the other contexts too,
    and `statics`, static trees, at every context. text: token ids that fill the contexts, repeated if need be.
    progress: called with the number of runs done and of all.

    Raises ValueError if the target's context is too short.
    """
    trees = [*probes(topks, steps, nodes), *statics]
    room = target.config.context - NEW_TOKENS - max(t.steps for t in trees)
    places = sorted({min(context, room) for context in contexts})
    if not text or places[0] < 1:
        raise ValueError(f"the target's context of {target.config.context} tokens is too short to measure rounds in")
    runs: list[tuple[Tree | None, int, int]] = []
    for batch in batches:
        for context in places:
            middle = context == places[len(places) // 2]
            here = [t for t in trees if middle or t.steps in (1, steps) or t.fixed]
            runs += [(tree, context, batch) for tree in (None, *here)]
    engines = {None: Engine(target, **TIMED)}
    engines |= {tree: Engine(target, drafter, tree, **TIMED) for tree in trees}
    found: dict[tuple, list] = {run: [] for run in runs}
    for repeat in range(-1, repeats):  # -1 warms up
        for done, (tree, context, batch) in enumerate(runs[:: 1 if repeat >= 0 else max(1, len(runs) // 8)], 1):
            prompts = [(text * (1 + context // len(text)))[:context]] * batch
            new = NEW_TOKENS if tree is None else NEW_TOKENS + tree.steps
            rounds = time_rounds(engines[tree], prompts, new, sampling or Sampling())
            if repeat >= 0:
                found[tree, context, batch] += rounds
                progress(repeat * len(runs) + done, repeats * len(runs))
    return [_medians(*run, rounds) for run, rounds in found.items()]


def _medians(tree: Tree | None, context: int, batch: int, found: list[tuple[int, dict]]) -> RoundCost:
    names = found[0][1]
    middle = statistics.mean(at for at, _ in found)
    return RoundCost(tree, middle, batch, {p: statistics.median(parts[p] for _, parts in found) for p in names})
