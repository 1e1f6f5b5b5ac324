"""A sweep as a page that needs nothing else, and as PNG files.

The page holds its figures as SVG, and the part of matplotlib's own font that it uses. It needs no network and no other
file.
"""

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from itertools import count
from pathlib import Path

import matplotlib
from fontTools import subset
from jinja2 import Environment
from markupsafe import Markup

from specdec import __version__
from specdec.cli.files import output_folder, write_text, write_whole
from specdec.engine.traces import DEPTH_IN_WORDS
from specdec.lab.figure_style import svg_and_png
from specdec.lab.sweep import figures, store

REPORT, FIGURES = "report.html", "figures"
LINE, GAP, CHARACTER, PAD = 19, 30, 6.7, 5  # pixels: height of a leaf, between levels, width of a letter, in a box
LONGEST = 14  # letters of a token that are shown
DRAWN: dict[str, Callable] = {  # file name -> function; titles and captions are in the template
    "tau": figures.heat_maps, "cost": figures.cost, "parts": figures.parts, "depth": figures.depth,
    "categories": figures.categories, "diagnostics": figures.diagnostics,
}  # fmt: skip


def write_report(out: Path, results: list[dict], timings: dict[str, dict], command: str) -> Path:
    """Write report.html and figures/*.png; return the page's path. Raises ValueError if nothing was measured."""
    if not any(store.decoded(group) for group in store.groups(results)):
        raise ValueError(f"{out} holds no point that decoded with a drafter: there is nothing to report")
    page = [_section(out, number, group, timings) for number, group in enumerate(store.groups(results), 1)]
    environment = Environment(autoescape=True, trim_blocks=True)
    environment.globals |= {"tree_name": store.tree_name, "best_tree_svg": best_tree_svg, "round_svg": round_svg}
    environment.globals |= {"columns": list(store.COLUMNS.items()), "depth_in_words": DEPTH_IN_WORDS}
    template = environment.from_string((files("specdec.lab.sweep") / "report.html.jinja").read_text(encoding="utf-8"))
    benchmarks = ", ".join(dict.fromkeys(r["names"]["benchmark"] for r in results))
    values = {"title": f"Speculative decoding: sweep of {benchmarks}", "groups": page}
    values["facts"] = _facts(results, timings, command)
    letters = set(template.render(values, font="", bold=""))
    html = template.render(values, font=_font("DejaVuSans", letters), bold=_font("DejaVuSans-Bold", letters))
    write_text(out / REPORT, html)
    return out / REPORT


def _section(out: Path, number: int, group: list[dict], timings: dict[str, dict]) -> dict:
    points = store.decoded(group)
    return {
        "title": store.title_of(group),
        "conditions": store.conditions_of(group),
        "notes": store.notes_of(group, timings),
        "rows": store.table_of(group, timings),
        "figures": _figures(out, number, points, timings),
        "chosen": [store.best(mine) for mine in store.by_drafter(points).values()],
        "best_trees": [r for r in group if r.get("trees")],
        "skipped": [r for r in group if "skipped" in r],
    }


def _figures(out: Path, number: int, points: list[dict], timings: dict[str, dict]) -> list[dict]:
    drawn = []
    for name, make in DRAWN.items() if points else ():
        arguments = (points, timings) if make in (figures.cost, figures.parts) else (points,)
        if (made := svg_and_png(make, *arguments)) is not None:
            file = output_folder(out / FIGURES) / f"{number}-{name}.png"
            write_whole(file, partial(Path.write_bytes, data=made[1]))
            drawn.append({"name": name, "svg": Markup(made[0])})
    return drawn


def _facts(results: list[dict], timings: dict[str, dict], command: str) -> list[tuple[str, str]]:
    machines = [t["machine"] for t in timings.values() if "machine" in t]
    lines = [f"{m['processor']}, {m['cores']} cores, torch threads: {m['threads']}, GPU: {m['gpu']}" for m in machines]
    versions = [f"torch {m['torch']}, Python {m['python']}" for m in machines]
    counts, skipped = store.counts_of(results), sum("skipped" in r for r in results)
    measured = f"{counts['points']}, each a row of a table; best trees: {counts['best_trees']}"
    return [
        ("machine", "; ".join(dict.fromkeys(lines))),
        ("versions", f"specdec {__version__}, " + "; ".join(dict.fromkeys(versions))),
        ("command", command),
        ("points", f"{measured}; combinations that do not fit: {skipped}"),
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


# Trees as SVG: what a round drafted and what of it was accepted, and the tree that a table of acceptance asks for


@dataclass
class DrawnNode:
    """What is drawn of a node."""

    text: str
    number: str = ""  # a short one, after the text
    accepted: bool = False  # it is on the accepted path
    bonus: bool = False  # it was not drafted: the target added it
    weight: float = 0.0  # 0..1, how much the box is filled


def round_svg(example: dict) -> str:
    """Draw a round of a trace (`diagnose.examples`): accepted tokens are blue, the target's own are orange."""
    path = set(example["path"])
    nodes = [
        DrawnNode(_shown(text), "" if i == 0 or q is None else _share(q), i in path, weight=float(i in path))
        for i, (text, q) in enumerate(zip(example["tokens"], example["draft"], strict=True))
    ]
    parents = list(example["parents"])
    if example["bonus"] is not None:
        nodes.append(DrawnNode(_shown(example["bonus"]), "", True, bonus=True))
        parents.append(example["path"][-1])
    return tree_svg(nodes, parents, f"draft tree of {len(parents)} nodes, {len(path) - 1} drafted tokens accepted")


def best_tree_svg(paths: Sequence[Sequence[int]], accept: Sequence[Sequence[float]]) -> str:
    """Draw a static tree: at every node its rank among the children, and how often it is reached."""
    places: dict[tuple[int, ...], int] = {(): 0}
    nodes, parents, reach = [DrawnNode("root", weight=1.0)], [0], [1.0]
    for path in sorted(map(tuple, paths), key=lambda path: (len(path), path)):
        parent = places[path[:-1]]
        places[path] = len(nodes)
        reach.append(reach[parent] * accept[len(path) - 1][path[-1]])
        parents.append(parent)
        nodes.append(DrawnNode(str(path[-1] + 1), _share(reach[-1]), weight=reach[-1]))
    return tree_svg(nodes, parents, f"static tree of {len(nodes)} nodes")


def tree_svg(nodes: list[DrawnNode], parents: list[int], title: str) -> str:
    """Draw a tree with its levels from left to right. parents: come before their children; the root is its own."""
    depth, heights = _layout(parents)
    widths = [max(CHARACTER * (len(n.text) + (len(n.number) + 1 if n.number else 0)) + 2 * PAD, 18) for n in nodes]
    columns = [max(w for w, d in zip(widths, depth, strict=True) if d == level) for level in range(max(depth) + 1)]
    lefts = [1 + sum(columns[:level]) + GAP * level for level in range(len(columns))]
    boxes = [
        {"node": node, "x": lefts[d], "y": LINE * (h + 0.5) + 1, "width": width}
        for node, d, h, width in zip(nodes, depth, heights, widths, strict=True)
    ]
    edges = [(boxes[parent], child) for parent, child in zip(parents[1:], boxes[1:], strict=True)]
    size = {"width": lefts[-1] + columns[-1] + 1, "height": LINE * (max(heights) + 1) + 2}
    template = (files("specdec.lab.sweep") / "tree.svg.jinja").read_text(encoding="utf-8")
    drawn = Environment(autoescape=True, trim_blocks=True).from_string(template)
    return drawn.render(title=title, boxes=boxes, edges=edges, pad=PAD, **size)


def _layout(parents: list[int]) -> tuple[list[int], list[float]]:
    """(depth, height in leaves) of every node."""
    depth, heights = [0] * len(parents), [0.0] * len(parents)
    leaves = count()  # from top to bottom

    def place(node: int) -> None:
        children = [child for child in range(node + 1, len(parents)) if parents[child] == node]
        for child in children:
            depth[child] = depth[node] + 1
            place(child)
        heights[node] = (heights[children[0]] + heights[children[-1]]) / 2 if children else next(leaves)

    place(0)
    return depth, heights


def _shown(text: str) -> str:
    """A token's text, whitespace visible, cut where it is long. What XML cannot hold is a replacement character."""
    visible = text.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥")
    visible = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in visible) or "∅"
    return visible if len(visible) <= LONGEST else visible[: LONGEST - 1] + "…"


def _share(value: float) -> str:
    return "1" if value > 0.995 else f"{value:.2f}".removeprefix("0")
