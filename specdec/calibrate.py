"""Adaptive policies by name, and what they need: what rounds cost here at any load, and how often drafts are right.

Costs are measured once for a machine, a pair, a tree and a number of rows, in some seconds, and kept in the user's
cache folder. How often drafts are right says the drafter's acceptance.json, or a guess, until rounds have told.
"""

import sys
from collections.abc import Callable, Sequence
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
from specdec.engine.report import Reads
from specdec.structs import Sampling
from specdec.trees.optimal import most_nodes, optimal_paths

HELP = "draft by the load: table, ema, survival"
GUESS = 0.6  # how often a level is accepted where the one before was, if nobody has measured it
CONTEXT = 128  # tokens before the rounds that are timed
ROUNDS = 3  # timed in a row, of which the first does not count
REPEATS = 3
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


class DepthProbe(Policy):
    """Drafts as many levels as it is told to."""

    levels = 0

    def __init__(self, sizes: Sequence[int]):
        self.sizes = sizes

    def plan(self, rows: int) -> int:
        return self.levels


class Probe(DepthProbe):
    """Also verifies as many nodes as it is told to."""

    width = 0

    def looks(self) -> bool:
        return self.width < self.sizes[self.levels]

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
