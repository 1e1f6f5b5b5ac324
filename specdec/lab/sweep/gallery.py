"""Trees as SVG: what a round drafted and what of it was accepted, and the tree that a table of acceptance asks for."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

LINE, GAP, CHARACTER, PAD = 19, 30, 6.7, 5  # pixels: height of a leaf, between levels, width of a letter, in a box
LONGEST = 14  # letters of a token that are shown
ACCEPTED, DRAFTED, BONUS = "#0072B2", "#8a8a8a", "#D55E00"


@dataclass
class DrawnNode:
    """What is drawn of a node."""

    text: str
    number: str = ""  # a short one, behind the text
    accepted: bool = False  # it stands on the accepted path
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
    xs, ys = [lefts[d] for d in depth], [LINE * (h + 0.5) + 1 for h in heights]
    width, height = lefts[-1] + columns[-1] + 1, LINE * (max(heights) + 1) + 2
    edges = [_edge(nodes[i], xs[p] + widths[p], ys[p], xs[i], ys[i]) for i, p in enumerate(parents) if i]
    boxes = [_box(*all_of) for all_of in zip(nodes, xs, ys, widths, strict=True)]
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.1f} {height:.1f}"'
    inner = "".join([f"<title>{escape(title)}</title>", *edges, *boxes])
    return f'<svg class="tree" role="img" {size} xmlns="http://www.w3.org/2000/svg">{inner}</svg>'


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


def _edge(child: DrawnNode, x0: float, y0: float, x1: float, y1: float) -> str:
    colour, width = (BONUS if child.bonus else ACCEPTED, 2) if child.accepted else ("#bdbdbd", 1)
    dash = ' stroke-dasharray="3 2"' if child.bonus else ""
    bend = (x0 + x1) / 2
    line = f"M{x0:.1f} {y0:.1f}C{bend:.1f} {y0:.1f} {bend:.1f} {y1:.1f} {x1:.1f} {y1:.1f}"
    return f'<path d="{line}" fill="none" stroke="{colour}" stroke-width="{width}"{dash}/>'


def _box(node: DrawnNode, x: float, y: float, width: float) -> str:
    colour = BONUS if node.bonus else ACCEPTED if node.accepted or node.weight else DRAFTED
    fill = f'fill="{ACCEPTED}" fill-opacity="{0.08 + 0.22 * node.weight:.2f}"' if node.weight else 'fill="#ffffff"'
    dash = ' stroke-dasharray="3 2"' if node.bonus else ""
    number = f'<tspan dx="6" fill="#555555">{escape(node.number)}</tspan>' if node.number else ""
    bold = ' font-weight="bold"' if node.accepted else ""
    return (
        f'<rect x="{x:.1f}" y="{y - 7.5:.1f}" width="{width:.1f}" height="15" rx="3" {fill} stroke="{colour}"{dash}/>'
        f'<text x="{x + PAD:.1f}" y="{y + 3.5:.1f}" font-size="10" xml:space="preserve"{bold}>'
        f"{escape(node.text)}{number}</text>"
    )


def _shown(text: str) -> str:
    """A token's text, whitespace visible, cut where it is long. What XML cannot hold is a replacement character."""
    visible = text.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥")
    visible = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in visible) or "∅"
    return visible if len(visible) <= LONGEST else visible[: LONGEST - 1] + "…"


def _share(value: float) -> str:
    return "1" if value > 0.995 else f"{value:.2f}".removeprefix("0")
