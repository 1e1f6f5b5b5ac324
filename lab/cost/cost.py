"""What a round costs on this machine: real rounds timed part by part, and simple functions through the medians.

A round of a tree (topk W, steps D, num_draft_tokens N) at a context of C tokens takes the sum of its parts, as
`Engine.round` has them (the engine's own marks; no part is timed by itself in a loop, where caches are warmer):

    grow     a(W) + level(W) (D - 1) + node(W) N + c(W) C (D - 1)     the draft steps and the selection of the nodes
    verify   f(N) + d D + (c + c' N) C                                the target's forward over the tree, and the rule
    commit   a + d D                                                  keys and values move
    extend   a + d D + c C                                            the drafter absorbs what was accepted
    host     a                                                        tokens are read, texts extended

Of a static tree grow is a + c C, with its own a and c. A plain round is f + c C and its own host. f is linear between
the measured N, the whole is linear between the measured W, and between the measured batch sizes. Coefficients are least
squares on relative errors, none negative. Time depends on shapes, not on what was said, so measurements are kept in a
file for each machine, pair of shapes, and version of the code.
"""

import hashlib
import json
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from specdec.api import load_tree, make_tree
from specdec.cli.files import output_folder, write_text
from specdec.contracts import TreePolicy
from specdec.engine.engine import Engine, RoundReport
from specdec.engine.recorder import versions
from specdec.types import Sampling

PARTS = ("grow", "verify", "commit", "extend", "host")
WIDTHS = (1, 2, 4, 8)
DEPTHS = (1, 2, 4, 8)
NODES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
CONTEXTS = (32, 128, 384)
NEW_TOKENS = 16  # of one probe: some rounds after the first, which is left out
PACKAGES = ("specdec", "drafters", "trees")


@dataclass(frozen=True, order=True)
class Setting:
    """A dynamic tree, or with topk 1 a chain, in SGLang's words; or a file's static tree, whose shape these are."""

    topk: int
    steps: int
    num_draft_tokens: int
    file: str | None = None

    def tree(self) -> TreePolicy:
        return load_tree(self.file) if self.file else make_tree(self.topk, self.steps, self.num_draft_tokens)

    def __str__(self) -> str:
        return self.file or f"{self.topk}/{self.steps}/{self.num_draft_tokens}"


def static(file: str | os.PathLike) -> Setting:
    """The setting of a tree file. ValueError, one sentence, if it holds none."""
    tree = load_tree(file)
    return Setting(tree.topk, tree.steps, tree.num_draft_tokens, str(file))


@dataclass(frozen=True)
class Point:
    """Medians over rounds of one setting (None: plain decoding) at one context and batch size."""

    setting: Setting | None
    context: float
    batch: int
    seconds: dict[str, float]  # by part


class Costs(Protocol):
    """Seconds of rounds; context may be an array, and the seconds are of its shape."""

    def round(self, setting: Setting, context: np.ndarray, batch: float) -> np.ndarray: ...

    def plain(self, context: np.ndarray, batch: float) -> np.ndarray: ...


def grid(topks: Sequence[int], steps: int, nodes: Sequence[int]) -> list[Setting]:
    """Every setting that there is with these topks, 1 to `steps` levels, and these numbers of nodes."""
    settings = []
    for topk in sorted(set(topks)):
        for depth in range(1, steps + 1):
            if topk == 1:
                settings.append(Setting(1, depth, depth + 1))
                continue
            most = topk + (depth - 1) * topk * topk + 1
            # With fewer nodes than levels + 1 the deepest levels are drafted in vain.
            settings += [Setting(topk, depth, n) for n in sorted(set(nodes)) if depth + 1 <= n <= most]
    return settings


# Measuring


def probes(topks: Sequence[int], steps: int, nodes: Sequence[int]) -> list[Setting]:
    """A part of the grid that the functions can be fitted to: all widths, few depths, every N several times."""
    depths = sorted({min(depth, steps) for depth in (*DEPTHS, steps)})
    chosen, turn = [], 0
    for topk in sorted(set(topks)):
        for depth in depths:
            here = [s for s in grid([topk], depth, nodes) if s.steps == depth]
            picked = here[turn % 3 :: 3] or here[-1:]
            chosen += sorted({*picked, *here[-1:]})
            turn += 1
    return chosen


class _Rounds:
    """An observer that remembers the clock, and the context before each round."""

    def __init__(self) -> None:
        self.contexts: list[int] = []

    def __call__(self, report: RoundReport) -> None:
        self.clock = report.clock
        self.contexts.append(max(len(row.prompt) + len(row.tokens) - 1 for row in report.rows))


def time_rounds(engine: Engine, prompts: list[list[int]], new: int, sampling: Sampling) -> list[tuple[int, dict]]:
    """Decode, and say of every round but the first its context and the seconds of its parts."""
    rounds = _Rounds()
    engine.generate(prompts, max_new_tokens=new, sampling=sampling, eos=frozenset(), observer=rounds)
    marks = [list(group) for shown, group in groupby(rounds.clock.intervals(), lambda m: m[0] == "output") if not shown]
    found = []
    for context, parts in list(zip(rounds.contexts, marks[1:], strict=False))[1:]:
        names = ("verify", "host") if engine.drafter is None else PARTS
        found.append((context, dict(zip(names, (seconds for _, seconds in parts), strict=True))))
    return found


def measure(
    target,
    drafter,
    text: list[int],
    *,
    topks: Sequence[int] = WIDTHS,
    steps: int = 8,
    nodes: Sequence[int] = NODES,
    contexts: Sequence[int] = CONTEXTS,
    batches: Sequence[int] = (1,),
    statics: Sequence[Setting] = (),
    sampling: Sampling | None = None,
    repeats: int = 5,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> list[Point]:
    """Time real rounds at the probes, in turn, `repeats` times over, and take medians.

    text: token ids that fill the contexts, repeated if need be. All probes are timed at the middle context, those of
    one level and the deepest also at the others; `statics`, which are timed each by itself, at all of them. `progress`
    is called with the number of runs done and of all.
    """
    settings = [*probes(topks, steps, nodes), *statics]
    room = target.config.context - NEW_TOKENS - max(s.steps for s in settings)
    places = sorted({min(context, room) for context in contexts})
    if not text or places[0] < 1:
        raise ValueError(f"the target's context of {target.config.context} tokens is too short to measure rounds in")
    runs: list[tuple[Setting | None, int, int]] = []
    for batch in batches:
        for context in places:
            middle = context == places[len(places) // 2]
            here = [s for s in settings if middle or s.steps in (1, steps) or s.file]
            runs += [(setting, context, batch) for setting in (None, *here)]
    how = {"graphs": False, "compact": False}  # a graph does not tell a round's parts apart; the batch stays whole
    engines = {s: Engine(target, *((drafter, s.tree()) if s else ()), **how) for s in (None, *settings)}
    return time_in_turn(engines, runs, text, sampling or Sampling(), repeats, progress)


def time_in_turn(
    engines: Mapping[Setting | None, Engine],
    runs: Sequence[tuple[Setting | None, int, int]],
    text: list[int],
    sampling: Sampling,
    repeats: int,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> list[Point]:
    """Time the rounds of each run, (setting, context, batch size), in turn; medians over all repeats."""
    found: dict[tuple, list] = {run: [] for run in runs}
    for repeat in range(-1, repeats):  # -1 warms up
        for done, (setting, context, batch) in enumerate(runs[:: 1 if repeat >= 0 else max(1, len(runs) // 8)], 1):
            prompts = [(text * (1 + context // len(text)))[:context]] * batch
            new = NEW_TOKENS if setting is None else NEW_TOKENS + setting.steps
            rounds = time_rounds(engines[setting], prompts, new, sampling)
            if repeat >= 0:
                found[setting, context, batch] += rounds
                progress(repeat * len(runs) + done, repeats * len(runs))
    return [_median(*run, rounds) for run, rounds in found.items()]


def _median(setting: Setting | None, context: int, batch: int, found: list[tuple[int, dict]]) -> Point:
    names = found[0][1]
    middle = statistics.mean(at for at, _ in found)
    return Point(setting, middle, batch, {p: statistics.median(parts[p] for _, parts in found) for p in names})


# The functions


class _Fit:
    """Least squares on relative errors: seconds = features @ weights. No weight is negative, for more work takes no
    less time: features to which noise gives a negative one are left out, and the others fitted again."""

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
    """The weights of the knots' values in linear interpolation at x; constant outside."""
    return [float(np.interp(x, knots, np.eye(len(knots))[i])) for i in range(len(knots))]


class _BatchFit:
    """The functions at one batch size."""

    def __init__(self, points: list[Point]):
        trees = [p for p in points if p.setting is not None]
        plain = [p for p in points if p.setting is None]
        self.widths = sorted({p.setting.topk for p in trees if not p.setting.file})
        knots = sorted({p.setting.num_draft_tokens for p in trees})
        self.grow = {w: _Fit(_grow, _of(trees, "grow", w)) for w in self.widths}
        statics = {p.setting for p in trees if p.setting.file}
        self.static = {s: _Fit(lambda s, c: [1, c], _of([p for p in trees if p.setting == s], "grow")) for s in statics}
        self.verify = _Fit(lambda s, c: [*hats(knots, s.num_draft_tokens), s.steps, c, c * s.num_draft_tokens],
                           _of(trees, "verify"))  # fmt: skip
        self.commit = _Fit(lambda s, c: [1, s.steps], _of(trees, "commit"))
        self.extend = _Fit(lambda s, c: [1, s.steps, c], _of(trees, "extend"))
        self.host = statistics.median(p.seconds["host"] for p in trees)
        self.plain_verify = _Fit(lambda c: [1, c], [((p.context,), p.seconds["verify"]) for p in plain])
        self.plain_host = statistics.median(p.seconds["host"] for p in plain)

    def parts(self, setting: Setting, context: np.ndarray) -> dict[str, np.ndarray]:
        flat = np.zeros_like(context, dtype=float)
        if setting.file:
            grow = self.static[setting](setting, context)
        else:
            shares = zip(self.widths, hats(self.widths, setting.topk), strict=True)
            grow = sum(share * self.grow[w](setting, context) for w, share in shares if share)
        return {
            "grow": flat + grow,
            "verify": flat + self.verify(setting, context),
            "commit": flat + self.commit(setting, context),
            "extend": flat + self.extend(setting, context),
            "host": flat + self.host,
        }

    def plain(self, context: np.ndarray) -> np.ndarray:
        return self.plain_verify(context) + self.plain_host


def _grow(s: Setting, c: np.ndarray) -> list:
    nodes = 0 if s.topk == 1 else s.num_draft_tokens  # of a chain they are steps + 1, which counts already
    return [1, s.steps - 1, nodes, c * (s.steps - 1)]


def _of(points: list[Point], part: str, width: int | None = None) -> list[tuple[tuple, float]]:
    """What to fit a part to: of all points, or of the dynamic trees of one width."""
    return [
        ((p.setting, p.context), p.seconds[part])
        for p in points
        if width is None or (p.setting.topk == width and not p.setting.file)
    ]


class CostModel:
    """`Costs` of this machine, from measured points."""

    def __init__(self, points: Sequence[Point]):
        self.points = list(points)
        self.batches = sorted({p.batch for p in self.points})
        self.fits = [_BatchFit([p for p in self.points if p.batch == b]) for b in self.batches]

    def parts(self, setting: Setting, context, batch: float = 1) -> dict[str, np.ndarray]:
        """Seconds by part. ValueError for what lies outside the measured widths, nodes or batch sizes."""
        self._check(setting, batch)
        context = np.asarray(context, dtype=float)
        shares = list(zip(self.fits, hats(self.batches, batch), strict=True))
        found = [(share, fit.parts(setting, context)) for fit, share in shares if share]
        return {part: sum(share * parts[part] for share, parts in found) for part in PARTS}

    def round(self, setting: Setting, context, batch: float = 1) -> np.ndarray:
        return sum(self.parts(setting, context, batch).values())

    def plain(self, context, batch: float = 1) -> np.ndarray:
        context = np.asarray(context, dtype=float)
        return sum(s * fit.plain(context) for fit, s in zip(self.fits, hats(self.batches, batch), strict=True) if s)

    def errors(self) -> list[float]:
        """|predicted - measured| / measured of a round, for every point: how well the functions fit."""
        found = []
        for p in self.points:
            told = self.plain(p.context, p.batch) if p.setting is None else self.round(p.setting, p.context, p.batch)
            measured = sum(p.seconds.values())
            found.append(abs(float(told) - measured) / measured)
        return found

    def _check(self, setting: Setting, batch: float) -> None:
        trees = [p.setting for p in self.points if p.setting is not None]
        if setting.file and setting not in trees:
            raise ValueError(f"rounds of the static tree {setting} were not measured: measure it too")
        widths = [s.topk for s in trees if not s.file]
        for name, value, known in (
            ("topk", min(widths) if setting.file else setting.topk, widths),
            ("num_draft_tokens", setting.num_draft_tokens, [s.num_draft_tokens for s in trees]),
            ("batch size", batch, self.batches),
        ):
            if not min(known) <= value <= max(known):
                raise ValueError(
                    f"{name} {value} lies outside what was measured, {min(known)} to {max(known)}: measure it too"
                )


# Kept measurements


def machine(device: torch.device) -> dict:
    """The kind of machine: what a time depends on beside the code."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [line for line in info.read_text(encoding="utf-8").splitlines() if line.startswith("model name")]
        cpu = names[0].split(":", 1)[1].strip() if names else cpu
    kind = {"cpu": cpu, "cores": os.cpu_count(), "threads": torch.get_num_threads(), "device": str(device)}
    return kind | ({"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {})


def identity(target, drafter, **how) -> dict:
    """Everything that measured times depend on: machine, versions, source, shapes, and how it was measured."""
    source = hashlib.sha256()
    for package in PACKAGES:
        for file in sorted((Path(__file__).parents[2] / package).rglob("*.py")):
            source.update(file.read_bytes())
    shapes = {
        name: [(key, list(value.shape), str(value.dtype)) for key, value in module.state_dict().items()]
        for name, module in (("target", target), ("drafter", drafter))
        if isinstance(module, torch.nn.Module)
    }
    trees = [Path(s.file).read_text(encoding="utf-8") for s in how.get("statics", ())]
    known = {"drafter": type(drafter).__name__, "conventions": dict(drafter.conventions), **shapes}
    return {
        "machine": machine(target.device),
        "versions": versions(),
        "source": source.hexdigest(),
        "pair": hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest(),
        "how": how | {"trees": trees},
    }


def cache_file(who: dict) -> Path:
    """Where the measurements of this identity are kept: under $XDG_CACHE_HOME, or ~/.cache."""
    key = hashlib.sha256(json.dumps(who, sort_keys=True, default=str).encode()).hexdigest()[:16]
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specdec" / "costs" / f"{key}.json"


def save_points(points: Sequence[Point], file: Path, who: dict) -> None:
    content = {"identity": who, "points": [asdict(point) for point in points]}
    output_folder(file.parent)
    write_text(file, json.dumps(content, indent=1, default=str) + "\n")


def load_points(file: Path) -> list[Point]:
    """ValueError, one sentence, if the file does not hold points."""
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))["points"]
        return [Point(**row | {"setting": Setting(**row["setting"]) if row["setting"] else None}) for row in rows]
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{file} holds no measured costs: measure anew with --remeasure") from None


def measured_costs(target, drafter, text: list[int], *, remeasure: bool = False, progress=None, **how) -> CostModel:
    """The costs of a pair on this machine: read if they are known, measured and kept if not. `how` as in `measure`."""
    who = identity(target, drafter, **how)
    file = cache_file(who)
    if file.is_file() and not remeasure:
        return CostModel(load_points(file))
    points = measure(target, drafter, text, **how, **({"progress": progress} if progress else {}))
    save_points(points, file, who)
    return CostModel(points)
