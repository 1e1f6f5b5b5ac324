"""The grid of trees that `specdec tune` predicts, and what their rounds cost."""

from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import cast

from specdec.structs import Sampling
from specdec.trees import Chain, DynamicTree, Tree
from specdec.tuning.costs import Costs, Kind, Point, cached_costs, identity, measure
from specdec.tuning.timing import SETTLE, Progress, TreeTimer, median, silent

WIDTHS = (1, 2, 4, 8)
DEPTHS = (1, 2, 4, 8)
NODES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
CONTEXTS = (32, 128, 384)
ROUNDS = 12  # timed in a turn
# Settings of an engine whose rounds are timed. A CUDA graph does not separate the parts of a round. A round costs the
# same every time only if ended rows stay in the batch and the drafter does not abstain.
TIMED = {"graphs": False, "compact": False, "abstain": False}


def useful_trees(topks: Sequence[int], steps: int, nodes: Sequence[int]) -> list[Tree]:
    """Return every chain and dynamic tree of these topks, 1 to `steps` levels and these numbers of nodes.

    Trees of fewer nodes than levels + 1 are left out: their deepest levels would be drafted in vain.
    """
    crossed = product(sorted(set(topks)), range(1, steps + 1), sorted(set(nodes)))
    found = [
        Chain(d) if k == 1 else DynamicTree(k, d, n)
        for k, d, n in crossed
        if k == 1 or d + 1 <= n <= DynamicTree.candidates(k, d) + 1
    ]
    return list(dict.fromkeys(found))


def probes(topks: Sequence[int], steps: int, nodes: Sequence[int]) -> list[Tree]:
    """Return the trees that are timed: of `useful_trees` every topk, few depths, and numbers of nodes several times."""
    depths = sorted({min(depth, steps) for depth in (*DEPTHS, steps)})
    chosen: list[Tree] = []
    turn = 0
    for topk in sorted(set(topks)):
        for depth in depths:
            here = [t for t in useful_trees([topk], depth, nodes) if t.steps == depth]
            picked = here[turn % 3 :: 3] or here[-1:]
            chosen += sorted(cast(set[DynamicTree], {*picked, *here[-1:]}))
            turn += 1
    return chosen


def grid_costs(target, drafter, *, remeasure: bool = False, progress: Progress = silent, **how) -> Costs:
    """Return the costs of a pair's trees on this machine: cached ones, else measured ones.

    remeasure: measure even if costs are cached. progress, how: as for `measure_grid`.
    """
    trees = [tree.text for tree in how.get("statics", ())]
    who = identity(target, drafter, grid=how | {"statics": trees})
    return cached_costs(who, lambda: (measure_grid(target, drafter, progress=progress, **how), True), remeasure)


def measure_grid(
    target,
    drafter,
    *,
    topks: Sequence[int] = WIDTHS,
    steps: int = 8,
    nodes: Sequence[int] = NODES,
    contexts: Sequence[int] = CONTEXTS,
    batches: Sequence[int] = (1,),
    statics: Sequence[Tree] = (),
    sampling: Sampling | None = None,
    repeats: int = 5,
    progress: Progress = silent,
) -> Costs:
    """Time real rounds of the probes, and of `statics`, static trees.

    All trees are timed at the middle context, and those of one level and the deepest at the other contexts too.
    progress: called with the number of runs done and of all.

    Raises ValueError if the target's context is too short.
    """
    trees = [*probes(topks, steps, nodes), *statics]
    longest = target.config.context - 3 - (SETTLE + ROUNDS) * (1 + max(t.steps for t in trees))
    places = sorted({min(context, longest) for context in contexts})
    if places[0] < 1:
        raise ValueError(f"the target's context of {target.config.context} tokens is too short to measure rounds in")
    timer = TreeTimer(target, drafter, sampling, **TIMED)

    def run(tree: Tree | None, context: int, rows: int) -> list[Point]:
        kind = Kind.of(tree)
        return [Point(kind, rows, context, *median(timer.seconds(tree, rows, ROUNDS, context)))]

    runs = []
    for rows in batches:
        for context in places:
            middle = context == places[len(places) // 2]
            here = [t for t in trees if middle or t.steps in (1, steps)]
            runs += [partial(run, tree, context, rows) for tree in (None, *here)]
    points, _ = measure(runs, repeats, progress)
    return Costs(points)
