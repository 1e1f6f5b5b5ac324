"""A comparison as a terminal table and as a chart."""

import math
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from specdec.cli.terminal import console
from specdec.lab.output import write_figure
from specdec.lab.sweep.compare import PARTS, Score
from specdec.lab.traces.summary import Interval

if TYPE_CHECKING:  # matplotlib is imported when something is drawn
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 180  # where there is no terminal


def print_scores(scores: list[Score], plain_rate: float) -> None:
    console(WIDTH).print(_table(scores, plain_rate))


def scores_table(scores: list[Score], plain_rate: float) -> str:
    """The table as a text."""
    return _recorded(scores, plain_rate).export_text(clear=False).rstrip("\n")


def scores_html(scores: list[Score], plain_rate: float) -> str:
    """The table as a notebook shows it, whose lines it does not break."""
    return _recorded(scores, plain_rate).export_html(
        inline_styles=True, code_format='<pre style="white-space: pre; line-height: 1.1">{code}</pre>'
    )


def _recorded(scores: list[Score], plain_rate: float) -> Console:
    shown = Console(width=WIDTH, file=StringIO(), record=True, force_jupyter=False)
    shown.print(_table(scores, plain_rate))
    return shown


def _table(scores: list[Score], plain_rate: float) -> Table:
    table = Table(title=f"plain decoding: {plain_rate:.0f} tokens/s")
    for column in ("", "tree (topk/steps/tokens)", "tau", "accepted to depth", "tokens/s", "to plain"):
        table.add_column(column, justify="left" if column in ("", "tree (topk/steps/tokens)") else "right")
    table.add_column("ms a round: draft, verify")
    table.add_column("lossless")
    for s in scores:
        parts = s.milliseconds_a_round
        whole = f"{parts['round']:.1f} in all"
        claim = "yes" if s.lossless else f"NO: {s.rule}"
        table.add_row(
            s.name,
            s.tree,
            f"{s.tau:.2f}{_interval(s.tau_interval)}",
            " ".join(f"{100 * a:.0f}" for a in s.acceptance_by_depth) + " %",
            f"{s.tokens_per_second:.0f}",
            f"{s.ratio_to_plain:.2f}{_interval(s.ratio_interval)}",
            whole if parts["round"] else f"{parts['draft']:.1f}, {parts['verify']:.1f}",
            f"{claim}, {s.same_as_plain} of {s.prompts} identical" if s.settled else claim,
        )
    return table


def _interval(interval: Interval) -> str:
    return "" if math.isnan(interval[0]) else f" ({interval[0]:.2f} to {interval[1]:.2f})"


def write_chart(scores: list[Score], path: Path, title: str) -> None:
    """Draw `chart` into a PNG."""
    write_figure(path, chart(scores, title))


def chart(scores: list[Score], title: str = "") -> "Figure":
    """tau and the speed to plain decoding, with intervals, and where a round's time goes: a figure of matplotlib."""
    from matplotlib import rc_context

    from specdec.lab.figure_style import COLOURS, PART_COLOURS, STYLE, subplots

    with rc_context(STYLE):
        figure, (left, middle, right) = subplots(1, 3, figsize=(14, 1.5 + 0.5 * len(scores)), sharey=True)
        figure.suptitle(title)
        _bars(left, [s.tau for s in scores], [s.tau_interval for s in scores], COLOURS[0])
        _bars(middle, [s.ratio_to_plain for s in scores], [s.ratio_interval for s in scores], COLOURS[2])
        left.set_xlabel("tau: tokens a round")
        middle.set_xlabel("speed, times plain decoding")
        left.set_yticks(range(len(scores)), [s.name + ("" if s.lossless else "\n(lossy)") for s in scores])
        left.invert_yaxis()
        start = [0.0] * len(scores)
        for part in PARTS:
            widths = [s.milliseconds_a_round[part] for s in scores]
            if any(widths):
                right.barh(range(len(scores)), widths, left=start, label=part, color=PART_COLOURS[part])
            start = [a + b for a, b in zip(start, widths, strict=True)]
        right.set_xlabel("ms a round")
        right.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=4)  # above: it would cover a bar
        for axis in (left, middle, right):
            axis.grid(axis="y", visible=False)
    return figure


def _bars(axis: "Axes", values: list[float], intervals: list[Interval], colour: str) -> None:
    """Bars with their values, intervals where there are any, and a line at plain decoding's 1."""
    entries = [{"value": v, "low": low, "high": high} for v, (low, high) in zip(values, intervals, strict=True)]
    known = [e if not math.isnan(e["low"]) else {"value": e["value"], "low": None, "high": None} for e in entries]
    from specdec.lab.figure_style import error_bars

    axis.barh(range(len(values)), values, color=colour, xerr=error_bars(known), ecolor="#555555", capsize=2)
    axis.axvline(1, color="grey", linewidth=0.8)
    for place, entry in enumerate(known):
        axis.text(entry["high"] or entry["value"], place, f"  {entry['value']:.2f}", va="center", zorder=3,
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 0})  # fmt: skip
    axis.margins(x=0.15)
