"""Trees as SVG: what a round drafted and what of it was accepted, and the tree that a table of acceptance asks for."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from jinja2 import Environment

LINE, GAP, CHARACTER, PAD = 19, 30, 6.7, 5  # pixels: height of a leaf, between levels, width of a letter, in a box
LONGEST = 14  # letters of a token that are shown


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
    depth = [0] * len(parents)
    children: list[list[int]] = [[] for _ in parents]
    for node in range(1, len(parents)):
        depth[node] = depth[parents[node]] + 1
        children[parents[node]].append(node)
    heights, leaves, stack = [0.0] * len(parents), 0, [0]
    while stack:  # depth first: leaves from top to bottom
        node = stack.pop()
        if not children[node]:
            heights[node], leaves = float(leaves), leaves + 1
        stack += reversed(children[node])
    for node in range(len(parents) - 1, -1, -1):  # children come after their parents
        if children[node]:
            heights[node] = (heights[children[node][0]] + heights[children[node][-1]]) / 2
    return depth, heights


def _shown(text: str) -> str:
    """A token's text, whitespace visible, cut where it is long. What XML cannot hold is a replacement character."""
    visible = text.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥")
    visible = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in visible) or "∅"
    return visible if len(visible) <= LONGEST else visible[: LONGEST - 1] + "…"


def _share(value: float) -> str:
    return "1" if value > 0.995 else f"{value:.2f}".removeprefix("0")
