"""What a round costs by the shape of its tree, and where speculation wins (Hydra):  python scripts/round_cost.py

    python scripts/round_cost.py dtype=bf16 tau=2.5
    python scripts/round_cost.py shape=llama_3_2_1b device=cuda 'num_draft_tokens=[4,16,64]'

Random weights in a real model's shape, and a random EAGLE-3 head for them, decode one row: plainly, and with every tree
of the grid, in turn. Rounds emit `tau` tokens whatever is drafted (`lab.cost.simulated_tau`), so costs are measured and
speeds are SIMULATED. The cost of a round in plain tokens is the tau at which its tree breaks even. The given tau is the
same for all trees, so the cheapest tree wins; larger trees have a greater tau in truth, and `tau to equal` says how
great it must be. Then the winner and plain decoding take turns in whole decodings, and the ratio of their speeds is
taken.

Writes round_cost.json and round_cost.png, and prints a table; the last line is one JSON object.
"""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

import checkout  # noqa: F401
import torch
from matplotlib import rc_context
from matplotlib.patches import Rectangle
from omegaconf import DictConfig, OmegaConf
from rich.table import Table
from tqdm import tqdm

from specdec.cli.files import output_folder
from specdec.cli.hydra_entry import hydra_command
from specdec.cli.terminal import console
from specdec.engine.engine import Engine
from specdec.lab.bench.bench import random_prompts
from specdec.lab.bench.shapes import random_head, random_target
from specdec.lab.cost.memory import bandwidth, read_bytes
from specdec.lab.cost.rounds import NEW_TOKENS, TIMED, RoundCost, time_in_turn
from specdec.lab.cost.simulated_tau import MARK, SimulatedTau
from specdec.lab.figure_style import PART_COLOURS, STYLE, subplots
from specdec.lab.machine import provenance
from specdec.lab.output import progress_bar, write_figure, write_json
from specdec.model.checkpoint import check_device, choose_dtype
from specdec.structs import Sampling
from specdec.trees.spec import TreeSpec

COUNTS = ("steps", "context", "repeats", "trials", "new_tokens")
REST = "rest"


@dataclass
class TreeCost:
    """What a round of a tree costs, in median seconds, and what follows from that."""

    tree: TreeSpec
    draft: float  # the levels of the tree and the selection, and the drafter's step over what was accepted
    verify: float  # the target's forward over the nodes, and the rule
    rest: float  # keys and values move, tokens are read
    plain_tokens: float  # the round in plain tokens, which is the tau at which it breaks even
    speedup: float  # over plain decoding, at the given tau
    tau_to_equal: float  # the tau with which it is as fast as the best tree is with the given one

    @property
    def seconds(self) -> float:
        return self.draft + self.verify + self.rest


def levels(topk: int, nodes: int, steps: int) -> int:
    """Levels of a tree of so many nodes: `steps`, or as near to that as there are nodes for the levels and levels for
    the nodes. A chain has nodes - 1."""
    needed = 1 - (topk + 1 - nodes) // topk**2
    return max(min(steps, nodes - 1), needed)


def trees_of(config: dict) -> list[TreeSpec]:
    """The trees to measure. Raises ValueError for a tree that cannot be, or cannot emit `tau` tokens."""
    for name in COUNTS:
        _check_count(name, config[name])
    for name in ("topk", "num_draft_tokens"):
        values = config[name]
        if not isinstance(values, list) or not values:
            raise ValueError(f"{name} takes a list of whole numbers, such as [1,4], and not {values!r}")
        for value in values:
            _check_count(name, value, 2 if name == "num_draft_tokens" else 1)
    if type(config["tau"]) not in (int, float):
        raise ValueError(f"tau must be a number, got {config['tau']!r}")
    topks, nodes = (sorted(set(config[name])) for name in ("topk", "num_draft_tokens"))
    trees = [TreeSpec(w, levels(w, n, config["steps"]), n) for w in topks for n in nodes]
    for tree in trees:
        SimulatedTau(config["tau"]).check(tree.steps)
    return trees


def _check_count(name: str, value, least: int = 1) -> None:
    if type(value) is not int or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")


def make_pair(config: dict, device: torch.device) -> tuple:
    shape = config.get("shape")
    if shape is None:
        raise ValueError("rounds are measured on random weights: give shape=, a name of conf/shape")
    dtype = choose_dtype(config["dtype"], shape["config"], device)
    target = random_target(shape["config"], f"{shape['name']}, random weights", dtype, device, config["seed"])
    return target, random_head(target, **shape["drafter"])


def check_room(target, trees: list[TreeSpec], config: dict) -> None:
    need = config["context"] + max(config["new_tokens"], NEW_TOKENS + max(tree.steps for tree in trees))
    if need > target.config.context:
        raise ValueError(f"{need} tokens are needed, and the context of {target.name} holds {target.config.context}")


def time_trees(engines: dict, prompt: list[int], repeats: int) -> tuple[RoundCost, list[RoundCost]]:
    """Time rounds of plain decoding and of every tree, each by its engine."""
    runs = [(tree, len(prompt), 1) for tree in engines]
    plain, *points = time_in_turn(engines, runs, prompt, Sampling(), repeats, progress_bar("rounds"))
    return plain, points


def costs_of(plain: RoundCost, points: list[RoundCost], tau: float) -> list[TreeCost]:
    """What follows from measured rounds of plain decoding and of trees."""
    token = sum(plain.seconds.values())
    least = min(sum(p.seconds.values()) for p in points)
    rows = []
    for p in points:
        s, whole = p.seconds, sum(p.seconds.values())
        parts = s["grow"] + s["extend"], s["verify"], s["commit"] + s["host"]
        rows.append(TreeCost(p.tree, *parts, whole / token, tau * token / whole, tau * whole / least))
    return rows


def run_for_real(target, drafter, tree: TreeSpec, prompt: list[int], config: dict) -> dict:
    """Decode with this tree and plainly, in turn, and compare tokens/s without the prefill and its token."""
    engines = {
        "plain": Engine(target),
        "speculative": Engine(target, drafter, tree.build(), SimulatedTau(config["tau"])),
    }
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for trial in tqdm(range(-1, config["trials"]), desc="the best for real", mininterval=1.0):  # -1 warms up
        for name, engine in engines.items():
            result = engine.generate([prompt], max_new_tokens=config["new_tokens"], eos=frozenset())
            if trial >= 0:
                rates[name].append((len(result.rows[0].tokens) - 1) / result.decode_seconds)
    ratios = [fast / slow for fast, slow in zip(rates["speculative"], rates["plain"], strict=True)]
    return {
        "setting": str(tree),
        **{f"{name}_tokens_per_second": statistics.median(found) for name, found in rates.items()},
        "tau": sum(result.rows[0].trace.emitted) / result.rows[0].trace.rounds,
        "ratio": statistics.median(ratios),
        "least_ratio": min(ratios),
        "most_ratio": max(ratios),
    }


def print_costs(rows: list[TreeCost], best: TreeCost, token: float, title: str) -> None:
    table = Table(title=title, caption=f"a plain token takes {1e3 * token:.2f} ms. Bold: the best")
    columns = ("topk", "num_draft_tokens", "steps", "draft ms", "verify ms", "rest ms", "round ms")
    for column in (*columns, "in plain tokens", "speed to plain", "tau to equal"):
        table.add_column(column, justify="right")
    for row in rows:
        tree, times = row.tree, (row.draft, row.verify, row.rest, row.seconds)
        cells = [str(tree.topk), str(tree.num_draft_tokens), str(tree.steps), *(f"{1e3 * t:.2f}" for t in times)]
        cells += [f"{row.plain_tokens:.2f}", f"{row.speedup:.2f}", f"{row.tau_to_equal:.2f}"]
        table.add_row(*cells, style="bold" if row is best else None)
    console(140).print(table)


def draw(rows: list[TreeCost], best: TreeCost, token: float, tau: float, title: str, path: Path) -> None:
    """Draw round costs in plain tokens by topk and num_draft_tokens, and where the time goes with the best topk."""
    topks = sorted({row.tree.topk for row in rows})
    nodes = sorted({row.tree.num_draft_tokens for row in rows})
    cost = {(row.tree.topk, row.tree.num_draft_tokens): row.plain_tokens for row in rows}
    with rc_context(STYLE):
        figure, (left, right) = subplots(1, 2, figsize=(11, 3.8))
        figure.suptitle(title)
        # As many colours on each side of tau: blue is faster than plain decoding, red slower.
        image = left.imshow([[cost[w, n] for n in nodes] for w in topks], cmap="RdBu_r", vmin=0, vmax=2 * tau)
        for i, w in enumerate(topks):
            for j, n in enumerate(nodes):
                light = abs(cost[w, n] - tau) > 0.6 * tau
                left.text(j, i, f"{cost[w, n]:.2f}", ha="center", va="center", color="white" if light else "black")
        place = nodes.index(best.tree.num_draft_tokens) - 0.5, topks.index(best.tree.topk) - 0.5
        left.add_patch(Rectangle(place, 1, 1, fill=False, edgecolor="black", linewidth=2.5))
        left.set_title("round in plain tokens, the tau to break even; framed: the best")
        left.set_xticks(range(len(nodes)), nodes)
        left.set_yticks(range(len(topks)), topks)
        left.set_xlabel("num_draft_tokens (N)")
        left.set_ylabel("topk (W)")
        left.grid(visible=False)
        figure.colorbar(image, ax=left, label="plain tokens a round")
        own = [row for row in rows if row.tree.topk == best.tree.topk]
        start = [0.0] * len(own)
        for part in ("draft", "verify", REST):
            heights = [getattr(row, part) / token for row in own]
            right.bar(
                range(len(own)), heights, bottom=start, label=part, color=PART_COLOURS.get(part, PART_COLOURS["host"])
            )
            start = [a + b for a, b in zip(start, heights, strict=True)]
        right.axhline(tau, color="black", linestyle="--", label=f"tau {tau:g} ({MARK})")
        right.axhline(1, color="black", linewidth=0.8, label="a plain token")
        right.set_title(f"where the time goes at topk {best.tree.topk}")
        right.set_xticks(range(len(own)), [str(row.tree.num_draft_tokens) for row in own])
        right.set_xlabel("num_draft_tokens (N)")
        right.set_ylabel("plain tokens")
        right.legend()
        write_figure(path, figure)


def entries_of(row: TreeCost) -> dict:
    tree = row.tree
    return {
        "topk": tree.topk,
        "num_draft_tokens": tree.num_draft_tokens,
        "steps": tree.steps,
        **{f"{part}_ms": 1e3 * getattr(row, part) for part in ("draft", "verify", REST)},
        "round_ms": 1e3 * row.seconds,
        "break_even_tau": row.plain_tokens,
        "speed_to_plain": row.speedup,
        "tau_to_equal_the_best": row.tau_to_equal,
    }


def run(config: DictConfig) -> None:
    settings = OmegaConf.to_container(config, resolve=True)
    trees, tau = trees_of(settings), settings["tau"]
    device, out = check_device(settings["device"]), output_folder(settings["out"])
    target, drafter = make_pair(settings, device)
    check_room(target, trees, settings)
    engines = {None: Engine(target, **TIMED)}
    engines |= {tree: Engine(target, drafter, tree.build(), SimulatedTau(tau), **TIMED) for tree in trees}
    prompt = random_prompts(target.vocab, 1, settings["seed"])(0, settings["context"])[0]
    ceiling = bandwidth(device)
    plain, points = time_trees(engines, prompt, settings["repeats"])
    token, rows = sum(plain.seconds.values()), costs_of(plain, points, tau)
    best = min(rows, key=lambda row: row.seconds)
    real = run_for_real(target, drafter, best.tree, prompt, settings)
    title = f"{MARK} tau {tau:g}: {target.name}, {str(target.dtype).removeprefix('torch.')}, {device}"
    result = {"benchmark": title, "simulated": True, **provenance(device), "settings": settings}
    result |= {"plain_ms": 1e3 * token, "bandwidth_bytes_per_second": ceiling, "best": entries_of(best), "real": real}
    result["plain_bytes"] = read_bytes(target, plain.context)
    result["plain_share_of_bandwidth"] = result["plain_bytes"] / token / ceiling
    result["rows"] = [entries_of(row) for row in rows]
    write_json(out / "round_cost.json", result)
    words = f"{title}. Best: topk {best.tree.topk}, num_draft_tokens {best.tree.num_draft_tokens}"
    draw(rows, best, token, tau, f"{words}, {real['ratio']:.2f} times plain decoding", out / "round_cost.png")
    print_costs(rows, best, token, title)
    told = {key: result[key] for key in ("benchmark", "plain_ms", "plain_share_of_bandwidth", "best", "real")}
    print(json.dumps(told | {"out": str(out)}))


main = hydra_command(run, "round_cost", "python scripts/round_cost.py")

if __name__ == "__main__":
    main()
