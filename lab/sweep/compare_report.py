"""A comparison as a terminal table and as a chart."""

import math
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lab.output import console, write_figure
from lab.sweep.compare import Score
from lab.trace.summary import Interval

WIDTH = 180  # where there is no terminal


def print_scores(scores: list[Score], plain_rate: float) -> None:
    console(WIDTH).print(_table(scores, plain_rate))


def scores_table(scores: list[Score], plain_rate: float) -> str:
    """The table as a text."""
    with (plain := Console(width=WIDTH, file=StringIO())).capture() as shown:
        plain.print(_table(scores, plain_rate))
    return shown.get().rstrip("\n")


def _table(scores: list[Score], plain_rate: float) -> Table:
    table = Table(title=f"plain decoding: {plain_rate:.0f} tokens/s")
    for column in ("", "tree (topk/steps/tokens)", "tau", "accepted to depth", "tokens/s", "to plain"):
        table.add_column(column, justify="left" if column in ("", "tree (topk/steps/tokens)") else "right")
    table.add_column("ms a round: draft, verify")
    table.add_column("lossless")
    for s in scores:
        parts = s.milliseconds_a_round
        claim = "yes" if s.lossless else f"NO: {s.rule}"
        table.add_row(
            s.name,
            s.tree,
            f"{s.tau:.2f}{_interval(s.tau_interval)}",
            " ".join(f"{100 * a:.0f}" for a in s.acceptance_by_depth) + " %",
            f"{s.tokens_per_second:.0f}",
            f"{s.ratio_to_plain:.2f}{_interval(s.ratio_interval)}",
            f"{parts['draft']:.2f}, {parts['verify']:.2f}",
            f"{claim}, {s.same_as_plain} of {s.prompts} identical" if s.settled else claim,
        )
    return table


def _interval(interval: Interval) -> str:
    return "" if math.isnan(interval[0]) else f" ({interval[0]:.2f} to {interval[1]:.2f})"


def write_chart(scores: list[Score], path: Path, title: str) -> None:
    """Draw tau, the speed to plain decoding, and where a round's time goes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = [s.name + ("" if s.lossless else "\n(lossy)") for s in scores]
    places = range(len(scores))
    figure, (left, middle, right) = plt.subplots(
        1, 3, figsize=(14, 1.5 + 0.5 * len(scores)), sharey=True, layout="constrained"
    )
    figure.suptitle(title)
    left.barh(places, [s.tau for s in scores], color="tab:blue")
    left.axvline(1, color="grey", linewidth=0.8)
    left.set_xlabel("tau: tokens a round")
    left.set_yticks(places, names)
    left.invert_yaxis()
    middle.barh(places, [s.ratio_to_plain for s in scores], color="tab:green")
    middle.axvline(1, color="grey", linewidth=0.8)
    middle.set_xlabel("speed, times plain decoding")
    start = [0.0] * len(scores)
    for part in ("draft", "verify", "commit"):
        widths = [s.milliseconds_a_round[part] for s in scores]
        right.barh(places, widths, left=start, label=part)
        start = [a + b for a, b in zip(start, widths, strict=True)]
    right.set_xlabel("ms a round")
    right.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3, frameon=False)  # above: it would cover a bar
    for axis, values in ((left, [s.tau for s in scores]), (middle, [s.ratio_to_plain for s in scores])):
        for place, value in zip(places, values, strict=True):
            axis.text(value, place, f" {value:.2f}", va="center")
        axis.margins(x=0.15)
    write_figure(path, figure)
    plt.close(figure)
