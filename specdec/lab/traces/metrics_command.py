"""Print every metric of one or more traces."""

import argparse
import json

from rich.table import Table

from specdec.cli.terminal import console
from specdec.engine.trace_files import read_trace
from specdec.engine.traces import DEPTH_IN_WORDS
from specdec.lab.traces.metrics import BY_DEPTH, METRICS, summary


def tables(summaries: dict[str, dict]) -> list[Table]:
    """Tables of summaries by name: the metrics, the metrics by depth, and tau by category where there are any."""
    count = "\n".join(f"{name}: {s['questions']} questions, {s['rounds']} rounds" for name, s in summaries.items())
    scalar = Table("metric", *summaries, title="metrics", caption=count)
    for name in METRICS:
        scalar.add_row(name, *(_cell(s["metrics"][name]) for s in summaries.values()))
    deep = Table("metric", "depth", *summaries, title="by depth", caption=f"acceptance_by_depth: {DEPTH_IN_WORDS}")
    for name in BY_DEPTH:
        columns = [s["by_depth"][name] for s in summaries.values()]
        for d in range(max(map(len, columns))):
            cells = [_cell(column[d]) if d < len(column) else "-" for column in columns]
            deep.add_row(name if d == 0 else "", str(d + 1), *cells)
    categories = list(dict.fromkeys(name for s in summaries.values() for name in s["by_category"]))
    grouped = Table("category", *summaries, title="tau by category")
    for category in categories:
        found = [s["by_category"].get(category) for s in summaries.values()]
        grouped.add_row(category, *(_cell(f["metrics"]["tau"]) if f else "-" for f in found))
    return [scalar, deep, *([grouped] if categories else [])]


def _cell(entry: dict[str, float | None]) -> str:
    if entry["value"] is None:
        return "-"
    between = "" if entry["low"] is None else f" [{entry['low']:.3f}, {entry['high']:.3f}]"
    return f"{entry['value']:.3f}{between}"


def run(args: argparse.Namespace) -> None:
    """Run `specdec trace metrics`."""
    how = {"level": args.level, "resamples": args.resamples, "seed": args.seed}
    summaries = {str(folder): summary(read_trace(folder).rows, **how) for folder in args.traces}
    if args.json:
        print(json.dumps(summaries))
        return
    for table in tables(summaries):
        console(160).print(table)
