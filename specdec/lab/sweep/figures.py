"""The figures of a sweep's report: what drafters and trees bring, at what cost, and why.

Each function takes the points of one target and benchmark that decoded with a drafter. It returns a figure, or None
where there is nothing to show. Bars at points are 95 % intervals over questions.
"""

import math
from typing import Any, cast

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specdec.lab.figure_style import WIDTH, error_bars, looks_of, stacked_bars, subplots
from specdec.lab.sweep.store import best, by_drafter, tau, tree_name

MOST_BARS = 24
DASHED: dict[str, Any] = {"color": "#999999", "linewidth": 0.8, "linestyle": (0, (4, 3))}

Results = list[dict]


def _chosen(points: Results) -> list[tuple[dict, dict]]:
    """Each drafter's point with the greatest tau, and how it is drawn: label, colour and marker."""
    by = by_drafter(points)
    found = {name: best(mine) for name, mine in by.items()}
    return [(r, {"label": f"{name}, {tree_name(r)}"} | looks_of(name, by)) for name, r in found.items()]


def heat_maps(points: Results) -> Figure | None:
    """Tau by steps and num_draft_tokens: a row for each drafter, a panel for each topk, one scale of colour.

    Trees that are more than these numbers have no place there.
    """
    points = [r for r in points if "shape" not in r["settings"]["tree"]]
    if not points:
        return None
    by = by_drafter(points)
    trees = [r["settings"]["tree"] for r in points]
    topks = sorted({t["topk"] for t in trees})
    columns = {k: sorted({t["num_draft_tokens"] or 0 for t in trees if t["topk"] == k}) for k in topks}
    steps = sorted({t["steps"] for t in trees})
    values = [tau(r)["value"] for r in points]
    cells = sum(map(len, columns.values()))
    width = min(WIDTH, 1.6 + 0.75 * cells + 0.5 * len(topks))
    size, ratios = (width, 0.5 + len(by) * (0.75 + 0.36 * len(steps))), [len(columns[k]) for k in topks]
    figure, axes = subplots(len(by), len(topks), figsize=size, width_ratios=ratios, squeeze=False)
    image = None
    for row, (name, mine) in zip(axes, by.items(), strict=True):
        for axis, topk in zip(row, topks, strict=True):
            some = [r for r in mine if r["settings"]["tree"]["topk"] == topk]
            image = _heat_map(axis, some, columns[topk], steps, min(values), max(values))
            axis.set_title(f"{name}, " + ("chains" if topk == 1 else f"topk {topk}"))
        row[0].set_ylabel("steps")
    for axis in axes[-1]:
        axis.set_xlabel("num_draft_tokens")
    figure.colorbar(image, ax=axes, label="tau: tokens per round", shrink=0.8)
    return figure


def _heat_map(axis: Axes, points: Results, columns: list[int], steps: list[int], low: float, high: float):
    grid = [[math.nan] * len(columns) for _ in steps]
    for r in points:
        tree = r["settings"]["tree"]
        grid[steps.index(tree["steps"])][columns.index(tree["num_draft_tokens"] or 0)] = tau(r)["value"]
    image = axis.imshow(grid, cmap="cividis", vmin=low, vmax=high, aspect="auto")
    for y, line in enumerate(grid):
        for x, value in enumerate(line):
            dark = not math.isnan(value) and value < low + 0.55 * (high - low)
            text = "–" if math.isnan(value) else f"{value:.2f}"
            axis.text(x, y, text, ha="center", va="center", color="white" if dark else "black")
    axis.set_xticks(range(len(columns)), [str(n) if n else "steps + 1" for n in columns])
    axis.set_yticks(range(len(steps)), [str(d) for d in steps])
    axis.grid(False)
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0)
    return image


def cost(points: Results, timings: dict[str, dict]) -> Figure | None:
    """Tau against nodes, which are exact, and against time, with the Pareto front and lines of equal speed."""
    figure, (left, right) = subplots(1, 2, figsize=(WIDTH, 3.9), sharey=True)
    by = by_drafter(points)
    for name, mine in by.items():
        values = [tau(r)["value"] for r in mine]
        how: dict[str, Any] = {"linestyle": "none", "capsize": 2, "elinewidth": 0.8, "label": name} | looks_of(name, by)
        bars = error_bars([tau(r) for r in mine])
        left.errorbar([r["nodes_a_round"] for r in mine], values, bars, **how)
        right.errorbar([_ms(timings[r["key"]]) for r in mine], values, bars, **how)
    left.set(xlabel="nodes verified per round, root counted", ylabel="tau: tokens per round")
    left.xaxis.get_major_locator().set_params(integer=True)
    right.set_xlabel("milliseconds per round")
    drawn = [(_ms(timings[r["key"]]), tau(r)["value"]) for r in points]
    front = pareto([(*place, r) for place, r in zip(drawn, points, strict=True)])
    xs, ys, _ = zip(*front, strict=True)
    right.plot(xs, ys, color="#444444", linewidth=1, zorder=1, label="front")
    left.margins(0.12)
    right.margins(0.18)
    _label(right, [(x, y, f"{r['names']['draft']}, {tree_name(r)}") for x, y, r in front], drawn)
    _equal_speed(right, [1e3 * y / x for x, y, _ in front])
    left.legend(loc="lower right")
    return figure


def _label(axis: Axes, points: list[tuple[float, float, str]], drawn: list[tuple[float, float]]) -> None:
    """Write a text next to each point (x, y, text), where no other text or marker is. Limits must be final."""
    ground = {"facecolor": "white", "alpha": 0.85, "pad": 0.8, "linewidth": 0}
    how: dict[str, Any] = {"bbox": ground, "zorder": 5, "fontsize": 7.5}
    size = cast(Figure, axis.figure).get_size_inches() * 72  # in points; an axis takes less than half of the width
    (x0, x1), (y0, y1) = axis.get_xlim(), axis.get_ylim()

    def place(x: float, y: float) -> tuple[float, float]:
        return (x - x0) / (x1 - x0) * size[0] * 0.42, (y - y0) / (y1 - y0) * size[1] * 0.8

    taken = [(left - 4, left + 4, up - 4, up + 4) for left, up in (place(*point) for point in drawn)]
    for x, y, text in points:
        (left, up), wide = place(x, y), 4.6 * len(text)
        for side, dy in ((-1, 6), (1, -12), (1, 6), (-1, -12), (-1, 18), (1, -24), (-1, 30), (1, -36), (1, -48)):
            start = left + (5 if side > 0 else -5 - wide)
            box = (start, start + wide, up + dy, up + dy + 11)
            inside = box[0] >= 0 and box[1] <= size[0] * 0.42 and box[2] >= 0
            if inside and not any(a < box[1] and box[0] < b and c < box[3] and box[2] < d for a, b, c, d in taken):
                taken.append(box)
                far: dict[str, Any] = {"ha": "left" if side > 0 else "right"}
                if abs(dy) > 12:
                    far["arrowprops"] = {"arrowstyle": "-", "color": "#777777", "linewidth": 0.6}
                axis.annotate(text, (x, y), xytext=(5 * side, dy), textcoords="offset points", **how, **far)
                break


def _ms(timing: dict) -> float:
    return sum(timing["milliseconds_a_round"].values())


def pareto(points: list[tuple[float, float, dict]]) -> list[tuple[float, float, dict]]:
    """Return the points (cost, gain, what) for which no other point costs as little and gains more, by rising cost."""
    front: list[tuple[float, float, dict]] = []
    for point in sorted(points, key=lambda p: (p[0], -p[1])):
        if not front or point[1] > front[-1][1]:
            front.append(point)
    return front


def _equal_speed(axis: Axes, speeds: list[float]) -> None:
    """Draw lines of equal tokens/s through the slowest and the fastest point, labelled where they leave the panel."""
    (x0, x1), (y0, y1) = axis.get_xlim(), axis.get_ylim()
    for speed in sorted({min(speeds), max(speeds)}):
        axis.plot([0, x1], [0, speed * x1 / 1e3], **DASHED, zorder=0)
        x = min(x1, 1e3 * y1 / speed)
        label: dict[str, Any] = {"ha": "right", "va": "bottom"} if x == x1 else {"ha": "left", "va": "bottom"}
        axis.annotate(f"{speed:.0f} tokens/s", (x, speed * x / 1e3), color="#666666", fontsize=7.5, **label)
    axis.set_xlim(max(x0, 0), x1)
    axis.set_ylim(y0, y1)


def depth(points: Results) -> Figure | None:
    """Acceptance by depth (`engine.traces.acceptance_by_depth`) of each drafter's point with the greatest tau."""
    chosen = _chosen(points)
    figure, axis = subplots(figsize=(WIDTH * 0.62, 3.2))
    for i, (r, looks) in enumerate(chosen):
        entries = [e for e in r["by_depth"]["acceptance_by_depth"] if e["value"] is not None]
        places = [d + 0.06 * (i - (len(chosen) - 1) / 2) for d in range(1, len(entries) + 1)]
        axis.errorbar(places, [e["value"] for e in entries], error_bars(entries), capsize=2, **looks)
    axis.set(xlabel="depth d", ylabel="share of all rounds that accepted d or more", ylim=(0, 1))
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
    axis.legend()
    return figure


def categories(points: Results) -> Figure | None:
    """Tau by category, of each drafter's point with the greatest tau."""
    chosen = _chosen(points)
    names = list(dict.fromkeys(c for r, _ in chosen for c in r["by_category"]))
    if len(names) < 2:
        return None
    figure, axis = subplots(figsize=(WIDTH * 0.62, 0.9 + 0.33 * len(names)))
    for i, (r, looks) in enumerate(chosen):
        found = {y: r["by_category"][c]["metrics"]["tau"] for y, c in enumerate(names) if c in r["by_category"]}
        places, entries = [y + 0.5 / len(chosen) * (i - (len(chosen) - 1) / 2) for y in found], [*found.values()]
        values, bars = [e["value"] for e in entries], error_bars(entries)
        axis.errorbar(values, places, xerr=bars, linestyle="none", capsize=2, **looks)
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.set_xlabel("tau: tokens per round")
    figure.legend(loc="outside upper right", ncols=2)
    return figure


def parts(points: Results, timings: dict[str, dict]) -> Figure | None:
    """Where a round's time goes, the fastest point first."""
    speed = {r["key"]: timings[r["key"]]["tokens_per_second"] or 0.0 for r in points}
    chosen = sorted(points, key=lambda r: -speed[r["key"]])[:MOST_BARS]
    figure, axis = subplots(figsize=(WIDTH, 1.0 + 0.23 * len(chosen)))
    spent = [timings[r["key"]]["milliseconds_a_round"] for r in chosen]
    ends = stacked_bars(axis, {part: [s[part] for s in spent] for part in spent[0]}, height=0.72, edgecolor="white")
    for y, (end, r) in enumerate(zip(ends, chosen, strict=True)):
        text = f"{speed[r['key']]:.0f} tokens/s, tau {tau(r)['value']:.2f}"
        axis.annotate(text, (end, y), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8)
    axis.set_yticks(range(len(chosen)), [f"{r['names']['draft']}, {tree_name(r)}" for r in chosen])
    axis.invert_yaxis()
    axis.set_xlim(0, 1.3 * max(ends))
    axis.grid(axis="y", visible=False)
    figure.legend(loc="outside upper right", ncols=4)
    return figure


def diagnostics(points: Results) -> Figure | None:
    """Calibration, entropy, norms of hidden states, and context, of each drafter's point with the greatest tau."""
    figure, axes = subplots(2, 2, figsize=(WIDTH, 6.4))
    for r, looks in _chosen(points):
        measured = r["diagnostics"]
        axes[0, 0].plot([], [], **looks)
        del looks["label"]
        _sized(axes[0, 0], measured["calibration"]["bins"], "draft", "-", looks)
        for which, line in (("target", "-"), ("draft", ":")):
            _sized(axes[0, 1], measured.get("entropy", {}).get(which, []), "entropy", line, looks)
        _norms(axes[1, 0], measured.get("norms", []), looks)
        bins = measured["context"]
        axes[1, 1].errorbar(
            [f"{b['from']}–{b['to'] - 1}" if b["to"] else f"{b['from']}–" for b in bins],
            [b["value"] for b in bins], error_bars(bins), capsize=2, **looks,
        )  # fmt: skip
    axes[0, 0].plot([0, 1], [0, 1], **DASHED)
    titles = ("Calibration", "Entropy", "Hidden state", "Context")
    xs = ("probability under the drafter", "entropy in nats", "draft step", "tokens before the round")
    ys = ("share accepted", "share accepted", "norm relative to draft step 0", "tau: tokens per round")
    for axis, title, x, y in zip(axes.flat, titles, xs, ys, strict=True):
        axis.set(title=title, xlabel=x, ylabel=y)
    axes[0, 1].plot([], [], color="#555555", label="of the target")
    axes[0, 1].plot([], [], color="#555555", linestyle=":", label="of the drafter, at the root")
    axes[0, 1].legend()
    axes[1, 0].xaxis.get_major_locator().set_params(integer=True)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure


def _sized(axis: Axes, bins: list[dict], x: str, line: str, looks: dict) -> None:
    """Draw the share accepted by x. The more a bin holds, the larger its marker."""
    places, shares = [b[x] for b in bins], [b["accepted"] for b in bins]
    most = max((b["count"] for b in bins), default=1)
    axis.plot(places, shares, color=looks["color"], linestyle=line, linewidth=1)
    axis.scatter(places, shares, [8 + 60 * b["count"] / most for b in bins], **looks, linewidth=0)
    axis.set_ylim(0, 1.04)


def _norms(axis: Axes, norms: list[dict], looks: dict) -> None:
    if not norms:
        return
    unit, steps = norms[0]["mean"], [n["step"] for n in norms]
    axis.plot(steps, [n["mean"] / unit for n in norms], **looks)
    low, high = [n["low"] / unit for n in norms], [n["high"] / unit for n in norms]
    axis.fill_between(steps, low, high, color=looks["color"], alpha=0.15, linewidth=0)
