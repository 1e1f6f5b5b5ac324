"""What any round costs on a machine: simple functions through the medians of measured rounds.

A round of a tree (topk W, steps D, num_draft_tokens N) at a context of C tokens takes the sum of its parts:

    grow     a(W) + level(W) (D - 1) + node(W) N + c(W) C (D - 1)     the draft steps and the selection of the nodes
    verify   f(N) + d D + (c + c' N) C                                the target's forward over the tree, and the rule
    commit   a + d D                                                  keys and values move
    extend   a + d D + c C                                            the drafter absorbs what was accepted
    host     a                                                        tokens are read, texts extended

The grow part of a static tree is a + c C, with an a and a c of its own. A plain round is f + c C and a host part of its
own. f is linear between the measured N. Everything is linear between the measured W, and between the measured batch
sizes. Coefficients are least squares on relative errors, and none is negative. A time depends on shapes and not on the
text, so measurements are cached for each machine, pair of shapes and version of the code.
"""

import statistics
from collections.abc import Callable, Sequence

import numpy as np

from specdec import auto
from specdec.cli.files import Kept
from specdec.cli.revision import code_digest
from specdec.engine.recorder import versions
from specdec.lab.cost.rounds import PARTS, RoundCost, measure_rounds
from specdec.trees import Tree
from specdec.trees.spec import parse_tree

TIMED_CODE = ("specdec", "specdec/drafters", "specdec/trees")  # folders of what is timed, and of what times it


class _Fit:
    """Least squares on relative errors: seconds = features @ weights.

    No weight is negative, because more work takes no less time. Features whose weight noise makes negative are left
    out, and the others fitted again."""

    def __init__(self, features: Callable[..., list], points: list[tuple[tuple, float]]):
        self.features = features
        seconds = np.array([s for _, s in points])
        rows = np.array([features(*at) for at, _ in points], dtype=float) / seconds[:, None]
        kept = np.ones(rows.shape[1], dtype=bool)
        while True:
            self.weights = np.zeros(len(kept))
            self.weights[kept] = np.linalg.lstsq(rows[:, kept], np.ones(len(rows)), rcond=None)[0]
            if self.weights.min() >= 0:
                break
            kept &= self.weights >= 0

    def __call__(self, *at) -> np.ndarray:
        return sum(weight * np.asarray(value) for weight, value in zip(self.weights, self.features(*at), strict=True))


def hats(knots: Sequence[float], x: float) -> list[float]:
    """The weights of the knots' values in linear interpolation at x. Outside the knots the nearest one has weight 1."""
    return [float(np.interp(x, knots, np.eye(len(knots))[i])) for i in range(len(knots))]


class _BatchFit:
    """The functions of all parts at one batch size."""

    def __init__(self, points: list[RoundCost]):
        trees = [p for p in points if p.tree is not None]
        plain = [p for p in points if p.tree is None]
        self.widths = sorted({p.tree.topk for p in trees if not p.tree.fixed})
        knots = sorted({p.tree.num_draft_tokens for p in trees})
        self.grow = {w: _Fit(_grow, _of(trees, "grow", w)) for w in self.widths}
        statics = {p.tree for p in trees if p.tree.fixed}
        self.static = {s: _Fit(lambda s, c: [1, c], _of([p for p in trees if p.tree == s], "grow")) for s in statics}
        self.verify = _Fit(lambda s, c: [*hats(knots, s.num_draft_tokens), s.steps, c, c * s.num_draft_tokens],
                           _of(trees, "verify"))  # fmt: skip
        self.commit = _Fit(lambda s, c: [1, s.steps], _of(trees, "commit"))
        self.extend = _Fit(lambda s, c: [1, s.steps, c], _of(trees, "extend"))
        self.host = statistics.median(p.seconds["host"] for p in trees)
        self.plain_verify = _Fit(lambda c: [1, c], [((p.context,), p.seconds["verify"]) for p in plain])
        self.plain_host = statistics.median(p.seconds["host"] for p in plain)

    def parts(self, tree: Tree, context: np.ndarray) -> dict[str, np.ndarray]:
        flat = np.zeros_like(context, dtype=float)
        if tree.fixed:
            grow = self.static[tree](tree, context)
        else:
            shares = zip(self.widths, hats(self.widths, tree.topk), strict=True)
            grow = sum(share * self.grow[w](tree, context) for w, share in shares if share)
        return {
            "grow": flat + grow,
            "verify": flat + self.verify(tree, context),
            "commit": flat + self.commit(tree, context),
            "extend": flat + self.extend(tree, context),
            "host": flat + self.host,
        }

    def plain(self, context: np.ndarray) -> np.ndarray:
        return self.plain_verify(context) + self.plain_host


def _grow(s: Tree, c: np.ndarray) -> list:
    nodes = 0 if s.topk == 1 else s.num_draft_tokens  # a chain has steps + 1, and steps is a feature already
    return [1, s.steps - 1, nodes, c * (s.steps - 1)]


def _of(points: list[RoundCost], part: str, width: int | None = None) -> list[tuple[tuple, float]]:
    """What a part is fitted to: ((tree, context), seconds) of all points, or of the dynamic trees of one topk."""
    return [
        ((p.tree, p.context), p.seconds[part])
        for p in points
        if width is None or (p.tree.topk == width and not p.tree.fixed)
    ]


class CostModel:
    """Seconds of rounds on this machine, by context in tokens and batch size. For an array of contexts they are an
    array."""

    def __init__(self, points: Sequence[RoundCost]):
        self.points = list(points)
        self.batches = sorted({p.batch for p in self.points})
        self.fits = [_BatchFit([p for p in self.points if p.batch == b]) for b in self.batches]

    def parts(self, tree: Tree, context, batch: float = 1) -> dict[str, np.ndarray]:
        """Seconds by part.

        Raises ValueError for what lies outside the measured topks, nodes or batch sizes, or was not measured."""
        self._check(tree, batch)
        context = np.asarray(context, dtype=float)
        found = [(share, fit.parts(tree, context)) for fit, share in self._shares(batch)]
        return {part: sum(share * parts[part] for share, parts in found) for part in PARTS}

    def round(self, tree: Tree, context, batch: float = 1) -> np.ndarray:
        return sum(self.parts(tree, context, batch).values())

    def plain(self, context, batch: float = 1) -> np.ndarray:
        context = np.asarray(context, dtype=float)
        return sum(share * fit.plain(context) for fit, share in self._shares(batch))

    def empty(self, tree: Tree, context, batch: float = 1) -> np.ndarray:
        """A round in which this tree's drafter has nothing to propose: a plain one, whose token it absorbs."""
        return self.plain(context, batch) + self.parts(tree, context, batch)["extend"]

    def errors(self) -> list[float]:
        """|predicted - measured| / measured of every measured round: how well the functions fit."""
        found = []
        for p in self.points:
            told = self.plain(p.context, p.batch) if p.tree is None else self.round(p.tree, p.context, p.batch)
            measured = sum(p.seconds.values())
            found.append(abs(float(told) - measured) / measured)
        return found

    def _shares(self, batch: float) -> list[tuple["_BatchFit", float]]:
        """The measured batch sizes next to this one, and how much each counts."""
        return [(fit, share) for fit, share in zip(self.fits, hats(self.batches, batch), strict=True) if share]

    def _check(self, tree: Tree, batch: float) -> None:
        trees = [p.tree for p in self.points if p.tree is not None]
        if tree.fixed and tree not in trees:
            raise ValueError(f"rounds of the static tree {tree} were not measured: measure it too")
        widths = [s.topk for s in trees if not s.fixed]
        for name, value, known in (
            ("topk", min(widths) if tree.fixed else tree.topk, widths),
            ("num_draft_tokens", tree.num_draft_tokens, [s.num_draft_tokens for s in trees]),
            ("batch size", batch, self.batches),
        ):
            if not min(known) <= value <= max(known):
                raise ValueError(
                    f"{name} {value} lies outside what was measured, {min(known)} to {max(known)}: measure it too"
                )


def identity(target, drafter, **how) -> dict:
    """Return all that measured times depend on: machine, versions, source, shapes of the pair, how it was measured."""
    how |= {"statics": [tree.text for tree in how.get("statics", ())]}
    known = {"versions": versions(), "source": code_digest(TIMED_CODE), "how": how}
    return auto.identity(target, drafter, None) | known


def measured_costs(target, drafter, text: list[int], *, remeasure: bool = False, progress=None, **how) -> CostModel:
    """Return the costs of a pair on this machine, from the cache if they are there, else measured and cached.

    Args:
        text, progress, how: As for `measure_rounds`.
        remeasure: Measure even where costs are cached.
    """
    measured = Kept("costs", identity(target, drafter, **how))

    def read(kept: dict) -> CostModel:
        trees = [point["tree"] and parse_tree(point["tree"]) for point in kept["points"]]
        return CostModel([RoundCost(**point | {"tree": t}) for point, t in zip(kept["points"], trees, strict=True)])

    if not remeasure and (kept := measured.read(read)) is not None:
        return kept
    costs = measure_rounds(target, drafter, text, **how, **({"progress": progress} if progress else {}))
    measured.write({"points": [vars(cost) | {"tree": cost.tree and str(cost.tree)} for cost in costs]})
    return CostModel(costs)
