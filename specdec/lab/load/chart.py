"""Throughput against interactivity: a line for each server or policy, a point for each load."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib import rc_context

from specdec.lab.figure_style import STYLE, looks_of, subplots
from specdec.lab.output import write_figure


def write_chart(path: Path, lines: Mapping[str, Sequence[Mapping]], note: str = "") -> None:
    """Draw the points of each line, `drive.drive`'s figures. note: is written across the figure."""
    with rc_context(STYLE):
        figure, axis = subplots(figsize=(6.4, 4.2))
        for name, points in lines.items():
            shown = [point for point in points if point["interactivity"]]
            xs, ys = ([point[key] for point in shown] for key in ("interactivity", "tokens_per_second"))
            axis.plot(xs, ys, label=name, **looks_of(name, lines))
            for x, y, point in zip(xs, ys, shown, strict=True):
                axis.annotate(f"{point['concurrency'] or point['rate']:g}", (x, y), (3, 3), textcoords="offset points")
        axis.set_xlabel("interactivity: tokens/s of one answer (1 / median TPOT)")
        axis.set_ylabel("throughput: tokens/s of all")
        axis.set_ylim(bottom=0)
        axis.legend()
        if note:
            axis.text(0.5, 0.5, note, transform=axis.transAxes, fontsize=28, color="grey", alpha=0.25, ha="center",
                      va="center", rotation=25)  # fmt: skip
        write_figure(path, figure)
