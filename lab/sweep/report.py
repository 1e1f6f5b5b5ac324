"""A sweep as a page that needs nothing else, as PNG files, and as tables on the terminal.

The page holds its figures as SVG, and the part of matplotlib's own font that it uses: no network, no other file.
"""

import base64
import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import matplotlib
from fontTools import subset
from jinja2 import Environment
from markupsafe import Markup
from rich.console import Console
from rich.table import Table

import lab.sweep.figures as figures
from lab.sweep.figures import best, drafters, shape
from lab.sweep.gallery import best_tree_svg, round_svg
from lab.sweep.store import groups
from specdec import __version__
from specdec.cli.files import output_folder, write_text, write_whole

REPORT, FIGURES = "report.html", "figures"
COLUMNS = {  # of the table of points: heading -> is it a number?
    "drafter": False,
    "tree": False,
    "tau": True,
    "95 %": True,
    "accepted to depth 1, 2, ...": False,
    "draft, verify: ms a round": True,
    "tokens/s": True,
    "to plain": True,
    "identical": True,
}
WHY = (
    "Each drafter's point with the greatest tau. Calibration: drafted tokens whose parent was accepted; on the dashed "
    "line the drafter is right as often as it thinks. Entropy: where the target chose a token for which there were "
    "drafts. Larger markers hold more tokens. Hidden state: what the drafter feeds back to itself, mean and the range "
    "from the 10th to the 90th percentile. Entropy and hidden states are of a few questions decoded once more."
)
BEST = "Each drafter's point with the greatest tau."
DRAWN: dict[str, tuple[str, Callable, str]] = {  # file name -> title, function, caption
    "tau": ("tau by tree", figures.heat_maps, "One scale of colour. A dash: no such tree, or not measured."),
    "cost": (
        "tau against cost",
        figures.cost,
        "Right: the points for which no other costs as little and gives more are joined and named; dashed, lines of "
        "equal speed.",
    ),
    "parts": ("Time of a round", figures.parts, "Fastest first. Prefill is left out."),
    "depth": (
        "Acceptance by depth",
        figures.depth,
        f"Share of the rounds that accepted at least so many drafted tokens. {BEST}",
    ),
    "categories": ("tau by category", figures.categories, BEST),
    "diagnostics": ("Why", figures.diagnostics, WHY),
}


# Words and tables, for the page and the terminal


def decoded(group: list[dict]) -> list[dict]:
    """The points of a group that were decoded speculatively."""
    return [r for r in group if r["kind"] == "decode" and "skipped" not in r and r["names"]["draft"] != "none"]


def title_of(group: list[dict]) -> str:
    names, sampling = group[0]["names"], group[0]["settings"]["sampling"]
    how = "greedy" if sampling["temperature"] == 0 else f"temperature {sampling['temperature']:g}"
    return f"{names['benchmark']}, {names['target']}, {how}"


def conditions_of(group: list[dict]) -> str:
    names, s = group[0]["names"], group[0]["settings"]
    filters = [f"{name} {s['sampling'][name]:g}" for name in ("top_k", "top_p", "min_p")]
    filters = filters if s["sampling"]["temperature"] and filters != ["top_k 0", "top_p 1", "min_p 0"] else []
    penalties = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}  # and what is off
    told = {name: s["sampling"].get(name, off) for name, off in penalties.items()}
    filters += [f"{name} {value:g}" for name, value in told.items() if value != penalties[name]]
    words = [f"{names['questions']} questions", f"{s['max_new_tokens']} new tokens a turn", *filters]
    words += [f"batch size {s['batch_size']}", s["dtype"], s["device"], "raw prompts" if s["raw"] else "chat template"]
    words += [f"{name} {value}" for name, value in s["template"].items()]
    return ", ".join(words) + "."


def notes_of(group: list[dict], timings: dict[str, dict]) -> list[str]:
    """What a reader must know before he believes a number."""
    points, notes = decoded(group), []
    if group[0]["names"]["skipped_records"]:
        notes.append(f"{group[0]['names']['skipped_records']} records of the benchmark could not be used.")
    left_out = max((r["turns_left_out"] for r in points), default=0)
    if left_out:
        notes.append(f"Turns left out because they do not fit the target's context: {left_out}.")
    lossy = sorted({r["settings"]["tree"]["verifier"] for r in points if not r["names"]["lossless"]})
    if lossy:
        notes.append(f"Lossy: {', '.join(lossy)} does not keep the target's distribution.")
    different = [r for r in points if r.get("identical", r["rows"]) < r["rows"]]
    if different:
        notes.append(f"Points with answers that differ from plain decoding's: {len(different)}.")
    busy = sum(t["load"] > t["machine"]["cores"] for t in (timings[r["key"]] for r in group) if "load" in t)
    if busy:
        notes.append(
            f"The machine had more to do than it has cores while {busy} points were measured: do not compare times."
        )
    return notes


def table_of(group: list[dict], timings: dict[str, dict]) -> list[dict]:
    """A row for each decoded point, plain decoding first: {"cells", "best"}."""
    points = decoded(group)
    plain = [r for r in group if r["kind"] == "decode" and r["names"]["draft"] == "none"]
    base = timings[plain[0]["key"]]["tokens_per_second"] if plain else None
    fastest = {
        max(mine, key=lambda r: timings[r["key"]]["tokens_per_second"] or 0.0)["key"]
        for mine in drafters(points).values()
    }
    return [{"cells": _cells(r, timings[r["key"]], base), "best": r["key"] in fastest} for r in plain + points]


def _cells(r: dict, timing: dict, base: float | None) -> list[str]:
    tau, rate = r["metrics"]["tau"], timing["tokens_per_second"]
    rates = [e["value"] for e in r["by_depth"]["vllm_per_position_rates"] if e["value"] is not None]
    spent = timing["milliseconds_a_round"]
    plainly = r["names"]["draft"] == "none"
    return [
        "plain decoding" if plainly else r["names"]["draft"],
        "" if plainly else shape(r),
        f"{tau['value']:.2f}",
        "" if tau["low"] is None or plainly else f"{tau['low']:.2f}–{tau['high']:.2f}",
        " ".join(f"{100 * share:.0f}" for share in rates) + (" %" if rates else ""),
        "" if spent["draft"] is None else f"{spent['draft']:.2f}, {spent['verify']:.2f}",
        f"{rate:.0f}" if rate else "",
        f"{rate / base:.2f}" if rate and base else "",
        "" if plainly or "identical" not in r else f"{r['identical']} of {r['rows']}",
    ]


def print_tables(results: list[dict], timings: dict[str, dict]) -> None:
    console = Console(width=None if os.isatty(1) else 160)
    for group in groups(results):
        table = Table(title=f"{title_of(group)}: {conditions_of(group)}")
        for name, number in COLUMNS.items():
            table.add_column(name, justify="right" if number else "left")
        for row in table_of(group, timings):
            table.add_row(*row["cells"])
        console.print(table)
        for note in notes_of(group, timings):
            console.print(note)


# The page


@dataclass
class Drawn:
    title: str
    svg: Markup
    caption: str


def write_report(out: Path, results: list[dict], timings: dict[str, dict], command: str) -> Path:
    """Write report.html and figures/*.png into a sweep's folder; returns the page's path.

    Raises ValueError if nothing was measured, or they cannot be written."""
    if not any(decoded(group) for group in groups(results)):
        raise ValueError(f"{out} holds no point that decoded with a drafter: there is nothing to report")
    page = [_section(out, number, group, timings) for number, group in enumerate(groups(results), 1)]
    environment = Environment(autoescape=True, trim_blocks=True)
    template = environment.from_string((files("lab.sweep") / "report.html.jinja").read_text(encoding="utf-8"))
    values = {
        "title": "Speculative decoding: sweep of " + ", ".join(dict.fromkeys(r["names"]["benchmark"] for r in results)),
        "facts": _facts(results, timings, command),
        "groups": page,
    }
    letters = set(template.render(values, font="", bold=""))
    html = template.render(values, font=_font("DejaVuSans", letters), bold=_font("DejaVuSans-Bold", letters))
    write_text(out / REPORT, html)
    return out / REPORT


def _section(out: Path, number: int, group: list[dict], timings: dict[str, dict]) -> dict:
    points = decoded(group)
    columns = [{"name": name, "number": is_number} for name, is_number in COLUMNS.items()]
    chosen = [best(mine) for mine in drafters(points).values()]
    measured = [r for r in group if r["kind"] == "best_tree" and "skipped" not in r]
    skipped = [r for r in group if "skipped" in r]
    return {
        "title": title_of(group),
        "conditions": conditions_of(group),
        "notes": notes_of(group, timings),
        "table": {"columns": columns, "rows": table_of(group, timings)},
        "figures": _figures(out, number, points, timings),
        "coverage": [_coverage(r) for r in chosen],
        "best_trees": [tree for r in measured for tree in _best_trees(r)],
        "gallery": [tree for r in chosen for tree in _gallery(r)],
        "skipped": [{"draft": r["names"]["draft"], "shape": _asked(r), "why": r["skipped"]} for r in skipped],
    }


def _figures(out: Path, number: int, points: list[dict], timings: dict[str, dict]) -> list[Drawn]:
    drawn = []
    for name, (title, make, caption) in DRAWN.items() if points else ():
        arguments = (points, timings) if make in (figures.cost, figures.parts) else (points,)
        made = figures.draw(make, *arguments)
        if made is None:
            continue
        svg, png = made
        file = output_folder(out / FIGURES) / f"{number}-{name}.png"
        write_whole(file, lambda aside, png=png: aside.write_bytes(png))
        drawn.append(Drawn(title, Markup(svg), caption))
    return drawn


def _asked(r: dict) -> str:
    tree = r["settings"].get("tree")
    return shape(r) if tree else "best tree"


def _coverage(r: dict) -> dict:
    told = r["diagnostics"]["coverage"]
    missed = ", ".join(f"{text!r} {count}" for text, count in told["missed"]) or "none"
    share = "" if told["share"] is None else f"{told['share']:.1%}"
    return {"draft": r["names"]["draft"], "size": f"{told['size']:,}", "share": share, "missed": missed}


def _best_trees(r: dict) -> list[dict]:
    return [
        {
            "questions": r["questions"],
            "caption": f"{r['names']['draft']}, {nodes} nodes: expected tau {tree['expected_tau']:.2f}",
            "svg": Markup(best_tree_svg(tree["paths"], r["accept"])),
        }
        for nodes, tree in r["trees"].items()
    ]


def _gallery(r: dict) -> list[dict]:
    return [
        {
            "caption": f"{r['names']['draft']}, {shape(r)}, question {e['question']}, after {e['context']} tokens: "
            f"{len(e['path']) - 1} accepted",
            "svg": Markup(round_svg(e)),
        }
        for e in r["examples"]
    ]


def _facts(results: list[dict], timings: dict[str, dict], command: str) -> list[tuple[str, str]]:
    machines = list(dict.fromkeys(tuple(t["machine"].items()) for t in timings.values() if "machine" in t))
    told = [
        f"{m['processor']}, {m['cores']} cores, torch threads: {m['threads']}, GPU: {m['gpu']}"
        for m in map(dict, machines)
    ]
    versions = [f"torch {m['torch']}, Python {m['python']}" for m in map(dict, machines)]
    skipped = sum("skipped" in r for r in results)
    return [
        ("machine", "; ".join(dict.fromkeys(told))),
        ("versions", f"specdec {__version__}, " + "; ".join(dict.fromkeys(versions))),
        ("command", command),
        ("points", f"{len(results) - skipped} measured; combinations that do not fit: {skipped}"),
    ]


def _font(name: str, letters: set[str]) -> str:
    """The part of matplotlib's font that has these letters, as a WOFF file in base64."""
    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{name}.ttf"
    options = subset.Options(flavor="woff", layout_features=["kern"], drop_tables=["FFTM"])
    font = subset.load_font(str(path), options)
    part = subset.Subsetter(options)
    part.populate(text="".join(letters))
    part.subset(font)
    file = io.BytesIO()
    subset.save_font(font, file, options)
    return base64.b64encode(file.getvalue()).decode()
