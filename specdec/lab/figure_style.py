"""The one style of the lab's figures, colour-blind safe, and what turns them into files."""

import io
from collections.abc import Callable, Iterable
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # not pyplot, whose state and display are a notebook's own

WIDTH = 9.6  # inches
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito
MARKERS = "osD^vPX"
PART_COLOURS = {"draft": "#E69F00", "verify": "#0072B2", "commit": "#CC79A7", "round": "#009E73", "host": "#999999"}
STYLE: Any = {
    "font.family": "DejaVu Sans", "font.size": 9, "legend.frameon": False, "lines.linewidth": 1.4,
    "lines.markersize": 5, "axes.titlesize": 9, "axes.spines.top": False, "axes.spines.right": False,
    "axes.edgecolor": "#777777", "axes.grid": True, "axes.axisbelow": True, "grid.color": "#e4e4e4",
    "grid.linewidth": 0.7, "svg.fonttype": "none", "svg.hashsalt": "specdec",
    "text.parse_math": False,  # names may hold a dollar sign
}  # fmt: skip


def looks_of(name: str, names: Iterable[str]) -> dict:
    """Colour and marker of one of several names."""
    i = list(names).index(name)
    return {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}


class Drawing(Figure):
    """A figure that a notebook shows, though pyplot knows nothing of it."""

    def _repr_png_(self) -> bytes:
        png = io.BytesIO()
        self.savefig(png, format="png", dpi=80)
        return png.getvalue()


def subplots(rows: int = 1, columns: int = 1, *, figsize: tuple[float, float], **how):
    """A figure of this size in inches, laid out by itself, and its axes as matplotlib's `subplots` gives them."""
    figure = Drawing(figsize=figsize, layout="constrained")
    return figure, figure.subplots(rows, columns, **how)


def error_bars(entries: list[dict]) -> list[list[float]]:
    """Distances to the ends of the intervals; 0 where there is no interval, and where rounding makes them negative."""
    below = [0.0 if e["low"] is None else max(e["value"] - e["low"], 0.0) for e in entries]
    return [below, [0.0 if e["high"] is None else max(e["high"] - e["value"], 0.0) for e in entries]]


def stacked_bars(axis: Axes, parts: dict[str, list[float]], **how) -> list[float]:
    """Draw the milliseconds of a round's parts, a horizontal bar for each round; returns where the bars end."""
    ends = [0.0] * len(next(iter(parts.values())))
    for part, widths in parts.items():
        if any(widths):
            axis.barh(range(len(widths)), widths, left=ends, label=part, color=PART_COLOURS[part], **how)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    axis.set_xlabel("milliseconds per round")
    return ends


def svg_and_png(make: Callable[..., Figure | None], *args) -> tuple[str, bytes] | None:
    """What `make` draws of `args`, as an SVG element and as the bytes of a PNG file; None if it draws nothing."""
    with rc_context(STYLE):
        figure = make(*args)
        if figure is None:
            return None
        svg, png = io.StringIO(), io.BytesIO()
        figure.savefig(svg, format="svg", metadata={"Date": None})
        figure.set_layout_engine("none")  # laid out once
        figure.savefig(png, format="png", dpi=150)
    text = svg.getvalue()
    return text[text.index("<svg") :], png.getvalue()
