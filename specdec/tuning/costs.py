"""What a round costs on this machine: functions fitted to measured rounds.

A round that drafts D levels by expanding E nodes below the root, and verifies N nodes of each row at a context of C
tokens, takes the sum of two parts:

    draft    a + b (D - 1) + c E + d C (D - 1) + (e D + f N) [dynamic] + g [cut]    all but verify; plainly p
    verify   v(N) + (h + i N) C                                                     the target's forward over the tree

v is linear between the measured N, and a plain round is N = 1. Dynamic trees also select the nodes of each level and of
the whole, and cut ones are copied to the host. Coefficients are least squares on relative errors for each measured
number of rows, and none is negative. Between numbers of rows everything is linear, and beyond the largest it continues
in the last slope.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from specdec import __version__, own
from specdec.cli.files import CachedJson
from specdec.cli.revision import code_digest
from specdec.contracts import TreePolicy
from specdec.machine import machine
from specdec.trees import DynamicTree
from specdec.tuning.timing import busy, in_turns

TIMED_CODE = ("specdec", "specdec/drafters", "specdec/trees")  # folders of what is timed, and of what times it
Fit = Callable[..., Any]  # of a round's kind and context: the seconds of a part of it


class Kind(NamedTuple):
    """What the seconds of a round depend on, apart from rows and context. By default a plain round."""

    levels: int = 0  # drafted
    nodes: int = 1  # verified for each row, the root included
    expanded: int = 0  # nodes below the root that the drafter is run for
    dynamic: bool = False  # the nodes are the best of more that were drafted
    cut: bool = False  # the host chose the nodes among those drafted

    @classmethod
    def of(cls, tree: TreePolicy | None) -> "Kind":
        """Return the kind of a tree's rounds; None: of plain rounds."""
        if tree is None:
            return PLAIN
        return cls(tree.steps, tree.num_draft_tokens, tree.draft_slots(), isinstance(tree, DynamicTree))


PLAIN = Kind()


class Point(NamedTuple):
    """Measured seconds of one kind of round."""

    kind: Kind
    rows: int
    context: float  # tokens of a row before the round
    draft: float
    verify: float  # 0 if the round was replayed as a whole

    @property
    def seconds(self) -> float:
        """Seconds of the round."""
        return self.draft + self.verify


def _fit(features: Callable[..., list], points: Iterable[tuple[Kind, float, float]]) -> Fit:
    """Return the function seconds = features @ weights that least squares on relative errors give.

    No weight is negative, because more work takes no less time. Features whose weight noise makes negative are left
    out, and the others fitted again.
    """
    seconds = np.array([s for *_, s in points])
    scale = np.maximum(seconds, 1e-6 * seconds.max() or 1.0)  # a part may take no time at all
    rows = np.array([features(*at) for *at, _ in points], dtype=float) / scale[:, None]
    used = rows.any(0)
    while True:
        weights = np.zeros(len(used))
        weights[used] = np.linalg.lstsq(rows[:, used], seconds / scale, rcond=None)[0]
        if weights.min() >= 0:
            break
        used &= weights > 0
    return lambda *at: sum(weight * np.asarray(x) for weight, x in zip(weights, features(*at), strict=True))


def _draft(kind: Kind, context) -> list:
    if not kind.levels:
        return [1, *[0] * 7]
    deeper, dynamic = kind.levels - 1, kind.dynamic
    selects = [dynamic * kind.levels, dynamic * kind.nodes]
    return [0, 1, deeper, kind.expanded, deeper * context, *selects, kind.cut]


def _fits(points: Sequence[Point]) -> tuple[Fit, Fit]:
    """Return the functions of one number of rows, for both parts of a round."""
    knots = sorted({p.kind.nodes for p in points})
    hats, slopes = np.eye(len(knots)), len({p.context for p in points}) > 1

    def verify(kind: Kind, context) -> list:
        own = [float(np.interp(kind.nodes, knots, hat)) for hat in hats]
        return [*own, context, context * kind.nodes] if slopes else own

    draft = _fit(_draft, [(p.kind, p.context, p.draft) for p in points])
    return draft, _fit(verify, [(p.kind, p.context, p.verify) for p in points])


class Costs:
    """Seconds of rounds on this machine. For an array of contexts, every function returns an array."""

    def __init__(self, points: Iterable[Point], padded: bool = False):
        """padded: a round has the next measured number of rows, whatever number of rows decodes."""
        self.points, self.padded = list(points), padded
        self.rows = sorted({p.rows for p in self.points})
        self.choices = sorted({p.kind.levels for p in self.points})  # numbers of levels that were measured
        self.context = float(np.median([p.context for p in self.points]))
        self._fits = [_fits([p for p in self.points if p.rows == rows]) for rows in self.rows]

    def parts(self, kind: Kind, rows: float = 1, context=None) -> tuple[Any, ...]:
        """Return the seconds of the draft and of the target's forward. context: by default the measured one."""
        context = self.context if context is None else np.asarray(context, dtype=float)
        shares = self._shares(rows)
        return tuple(sum(share * fits[part](kind, context) for fits, share in shares) for part in (0, 1))

    def seconds(self, kind: Kind, rows: float = 1, context=None) -> Any:
        """Return the seconds of a round. Arguments as for `parts`."""
        return sum(self.parts(kind, rows, context))

    def errors(self) -> list[float]:
        """Return |predicted - measured| / measured of every measured round: how well the functions fit."""
        return [abs(float(self.seconds(p.kind, p.rows, p.context)) / p.seconds - 1) for p in self.points]

    def _shares(self, rows: float) -> list[tuple[tuple[Fit, Fit], float]]:
        """Return the fits of the neighbouring numbers of rows, and the weight of each."""
        if self.padded:
            rows = next((known for known in self.rows if known >= rows), self.rows[-1])
        if rows <= self.rows[0] or len(self.rows) == 1:
            return [(self._fits[0], 1.0)]
        right = min(int(np.searchsorted(self.rows, rows)), len(self.rows) - 1)
        low, high = self.rows[right - 1], self.rows[right]
        share = (rows - low) / (high - low)
        return [(self._fits[right - 1], 1 - share), (self._fits[right], share)]


def measure(runs: Sequence[Callable[[], list[Point]]], repeats: int, shown: str = "") -> tuple[list[Point], bool]:
    """Return the points of all runs, which take turns, and whether the machine was busy, by plain rounds.

    The fastest of all turns counts, because other programs only add time.
    """
    kinds = [same for turns in in_turns(runs, repeats, shown) for same in zip(*turns, strict=True)]
    disturbed = any(busy([p.seconds for p in same]) for same in kinds if same[0].kind == PLAIN)
    return [min(same, key=lambda p: p.seconds) for same in kinds], disturbed


def identity(target, drafter, **what) -> dict:
    """Return all that measured times depend on: machine, versions, source, shapes of the pair, and `what`."""
    shapes = [
        (key, list(value.shape), str(value.dtype))
        for module in (target, drafter)
        if isinstance(module, torch.nn.Module)
        for key, value in module.state_dict().items()
    ]
    pair = [type(drafter).__name__, dict(drafter.conventions), shapes, own.digest(drafter)]
    return {
        "machine": machine(target.device),
        "torch": torch.__version__,
        "specdec": __version__,
        "source": code_digest(TIMED_CODE),
        "pair": hashlib.sha256(json.dumps(pair, default=str).encode()).hexdigest(),
    } | what


def cached_costs(who: Mapping, measure: Callable[[], tuple[Costs, bool]], anew: bool = False) -> Costs:
    """Return the costs that are cached under the identity `who`, else measured ones.

    measure: returns costs, and whether to cache them. anew: measure even if costs are cached.
    """
    place = CachedJson("tuning", who)

    def read(used: dict) -> Costs:
        return Costs([Point(Kind(*kind), *rest) for kind, *rest in used["points"]], used["padded"])

    if not anew and (used := place.read(read)) is not None:
        return used
    costs, keep = measure()
    if keep:
        place.write({"points": costs.points, "padded": costs.padded})
    return costs
