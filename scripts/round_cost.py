"""What a round costs by the shape of its tree, and where speculation wins (Hydra):  python scripts/round_cost.py

    python scripts/round_cost.py dtype=bf16 tau=2.5
    python scripts/round_cost.py shape=llama_3_2_1b device=cuda 'num_draft_tokens=[4,16,64]'

Random weights in a real model's shape, and a random EAGLE-3 head for it, decode one row: plainly, and with every tree
of the grid, in turn. Rounds emit `tau` tokens whatever is drafted (`lab.cost.simulated_tau`), so costs are measured and
speeds SIMULATED. The cost of a round in plain tokens is the tau at which its tree breaks even. A given tau is the same
for all trees, so the cheapest of them wins; larger ones have a greater tau in truth, and `tau to equal` says how great
it must be. Then the winner and plain decoding take turns in whole decodings: the ratio of their speeds.

Writes round_cost.json and round_cost.png, and prints a table; the last line is one JSON object.
"""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch
from lab.cost.cost import NEW_TOKENS, Point, Setting, machine, time_in_turn
from lab.cost.hardware import bandwidth, read_bytes
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from lab.bench.bench import header, random_prompts
from lab.bench.shapes import random_head, random_target
from lab.cost.simulated_tau import MARK, SimulatedTau
from lab.sweep.figures import PARTS, STYLE, plt
from specdec.cli.files import output_folder, write_whole
from specdec.cli.hydra_entry import hydra_command
from specdec.engine.engine import Engine
from specdec.model.checkpoint import check_device, choose_dtype
from specdec.types import Sampling

COUNTS = ("steps", "context", "repeats", "trials", "new_tokens")
REST = "rest"


@dataclass
class Row:
    """A tree's round: seconds by part, medians, and what follows from them."""

    setting: Setting
    draft: float  # the levels of the tree and the selection, and the drafter's step over what was accepted
    verify: float  # the target's forward over the nodes, and the rule
    rest: float  # keys and values move, tokens are read
    plain_tokens: float  # the round by the time of a plain token: the tau at which it breaks even
    speedup: float  # over plain decoding, at the given tau
    tau_to_equal: float  # with which it is as fast as the best tree with the given tau

    @property
    def seconds(self) -> float:
        return self.draft + self.verify + self.rest


def levels(topk: int, nodes: int, steps: int) -> int:
    """Levels of a tree of so many nodes: `steps`, if they are neither more than the nodes behind the root nor too few
    to hold them. A chain has nodes - 1."""
    needed = 1 - (topk + 1 - nodes) // topk**2
    return max(min(steps, nodes - 1), needed)


def grid(config: dict) -> list[Setting]:
    """ValueError, one sentence, for a tree that cannot be or cannot emit so many tokens."""
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
    settings = [Setting(w, levels(w, n, config["steps"]), n) for w in topks for n in nodes]
    for setting in settings:
        SimulatedTau(config["tau"]).check(setting.steps)
    return settings


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


def check_room(target, settings: list[Setting], config: dict) -> None:
    need = config["context"] + max(config["new_tokens"], NEW_TOKENS + max(s.steps for s in settings))
    if need > target.config.context:
        raise ValueError(f"{need} tokens are needed, and the context of {target.name} holds {target.config.context}")


def time_grid(engines: dict, prompt: list[int], repeats: int) -> tuple[Point, list[Point]]:
    """Rounds of plain decoding and of every setting, each by its engine."""
    runs = [(setting, len(prompt), 1) for setting in engines]
    with tqdm(desc="rounds", total=len(runs) * repeats, mininterval=1.0) as bar:
        plain, *points = time_in_turn(
            engines, runs, prompt, Sampling(), repeats, lambda done, of: bar.update(done - bar.n)
        )
    return plain, points


def rows_of(plain: Point, points: list[Point], tau: float) -> list[Row]:
    token = sum(plain.seconds.values())
    least = min(sum(p.seconds.values()) for p in points)
    rows = []
    for p in points:
        s, whole = p.seconds, sum(p.seconds.values())
        parts = s["grow"] + s["extend"], s["verify"], s["commit"] + s["host"]
        rows.append(Row(p.setting, *parts, whole / token, tau * token / whole, tau * whole / least))
    return rows


def run_for_real(target, drafter, setting: Setting, prompt: list[int], config: dict) -> dict:
    """Whole decodings with this setting and plainly, in turn: tokens/s without the prefill and its token."""
    engines = {
        "plain": Engine(target),
        "speculative": Engine(target, drafter, setting.tree(), SimulatedTau(config["tau"])),
    }
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for trial in tqdm(range(-1, config["trials"]), desc="the best for real", mininterval=1.0):  # -1 warms up
        for name, engine in engines.items():
            result = engine.generate([prompt], max_new_tokens=config["new_tokens"], eos=frozenset())
            if trial >= 0:
                rates[name].append((len(result.rows[0].tokens) - 1) / result.decode_seconds)
    ratios = [fast / slow for fast, slow in zip(rates["speculative"], rates["plain"], strict=True)]
    return {
        "setting": str(setting),
        **{f"{name}_tokens_per_second": statistics.median(found) for name, found in rates.items()},
        "tau": sum(result.rows[0].trace.emitted) / result.rows[0].trace.rounds,
        "ratio": statistics.median(ratios),
        "least_ratio": min(ratios),
        "most_ratio": max(ratios),
    }


def print_rows(rows: list[Row], best: Row, token: float, title: str) -> None:
    table = Table(title=title, caption=f"a plain token takes {1e3 * token:.2f} ms. Bold: the best")
    columns = ("topk", "num_draft_tokens", "steps", "draft ms", "verify ms", "rest ms", "round ms")
    for column in (*columns, "in plain tokens", "speed to plain", "tau to equal"):
        table.add_column(column, justify="right")
    for row in rows:
        s, times = row.setting, (row.draft, row.verify, row.rest, row.seconds)
        cells = [str(s.topk), str(s.num_draft_tokens), str(s.steps), *(f"{1e3 * t:.2f}" for t in times)]
        cells += [f"{row.plain_tokens:.2f}", f"{row.speedup:.2f}", f"{row.tau_to_equal:.2f}"]
        table.add_row(*cells, style="bold" if row is best else None)
    Console(width=None if Console().is_terminal else 140).print(table)


def draw(rows: list[Row], best: Row, token: float, tau: float, title: str, path: Path) -> None:
    """Round costs in plain tokens by topk and num_draft_tokens; and where the time goes with the best topk."""
    topks, nodes = (sorted({getattr(row.setting, of) for row in rows}) for of in ("topk", "num_draft_tokens"))
    cost = {(row.setting.topk, row.setting.num_draft_tokens): row.plain_tokens for row in rows}
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
        figure.suptitle(title)
        # As many colours on each side of tau: blue is faster than plain decoding, red slower.
        image = left.imshow([[cost[w, n] for n in nodes] for w in topks], cmap="RdBu_r", vmin=0, vmax=2 * tau)
        for i, w in enumerate(topks):
            for j, n in enumerate(nodes):
                light = abs(cost[w, n] - tau) > 0.6 * tau
                left.text(j, i, f"{cost[w, n]:.2f}", ha="center", va="center", color="white" if light else "black")
        place = nodes.index(best.setting.num_draft_tokens) - 0.5, topks.index(best.setting.topk) - 0.5
        left.add_patch(plt.Rectangle(place, 1, 1, fill=False, edgecolor="black", linewidth=2.5))
        left.set_title("round in plain tokens, the tau to break even; framed: the best")
        left.set_xticks(range(len(nodes)), nodes)
        left.set_yticks(range(len(topks)), topks)
        left.set_xlabel("num_draft_tokens (N)")
        left.set_ylabel("topk (W)")
        left.grid(visible=False)
        figure.colorbar(image, ax=left)
        own = [row for row in rows if row.setting.topk == best.setting.topk]
        start = [0.0] * len(own)
        for part in ("draft", "verify", REST):
            heights = [getattr(row, part) / token for row in own]
            right.bar(range(len(own)), heights, bottom=start, label=part, color=PARTS.get(part, PARTS["host"]))
            start = [a + b for a, b in zip(start, heights, strict=True)]
        right.axhline(tau, color="black", linestyle="--", label=f"tau {tau:g} ({MARK})")
        right.axhline(1, color="black", linewidth=0.8, label="a plain token")
        right.set_title(f"where the time goes at topk {best.setting.topk}")
        right.set_xticks(range(len(own)), [str(row.setting.num_draft_tokens) for row in own])
        right.set_xlabel("num_draft_tokens (N)")
        right.set_ylabel("plain tokens")
        right.legend()
        write_whole(path, lambda aside: figure.savefig(aside, dpi=130, format="png"))
        plt.close(figure)


def as_json(row: Row) -> dict:
    s = row.setting
    return {
        "topk": s.topk,
        "num_draft_tokens": s.num_draft_tokens,
        "steps": s.steps,
        **{f"{part}_ms": 1e3 * getattr(row, part) for part in ("draft", "verify", REST)},
        "round_ms": 1e3 * row.seconds,
        "break_even_tau": row.plain_tokens,
        "speed_to_plain": row.speedup,
        "tau_to_equal_the_best": row.tau_to_equal,
    }


def run(config: DictConfig) -> None:
    settings = OmegaConf.to_container(config, resolve=True)
    trees, tau = grid(settings), settings["tau"]
    device, out = check_device(settings["device"]), output_folder(settings["out"])
    target, drafter = make_pair(settings, device)
    check_room(target, trees, settings)
    how = {"graphs": False, "compact": False}  # of graphs the parts could not be told apart; the batch stays whole
    engines = {None: Engine(target, **how)}
    engines |= {s: Engine(target, drafter, s.tree(), SimulatedTau(tau), **how) for s in trees}
    prompt = random_prompts(target.vocab, 1, settings["seed"])(0, settings["context"])[0]
    ceiling = bandwidth(device)
    plain, points = time_grid(engines, prompt, settings["repeats"])
    token, rows = sum(plain.seconds.values()), rows_of(plain, points, tau)
    best = min(rows, key=lambda row: row.seconds)
    real = run_for_real(target, drafter, best.setting, prompt, settings)
    title = f"{MARK} tau {tau:g}: {target.name}, {str(target.dtype).removeprefix('torch.')}, {device}"
    result = {"benchmark": title, "simulated": True, **header(device, machine(device)), "settings": settings}
    result |= {"plain_ms": 1e3 * token, "bandwidth_bytes_per_second": ceiling, "best": as_json(best), "real": real}
    result["plain_bytes"] = read_bytes(target, plain.context)
    result["plain_share_of_bandwidth"] = result["plain_bytes"] / token / ceiling
    result["rows"] = [as_json(row) for row in rows]
    text = json.dumps(result, indent=1) + "\n"
    write_whole(out / "round_cost.json", lambda aside: aside.write_text(text, encoding="utf-8"))
    words = f"{title}. Best: topk {best.setting.topk}, num_draft_tokens {best.setting.num_draft_tokens}"
    draw(rows, best, token, tau, f"{words}, {real['ratio']:.2f} times plain decoding", out / "round_cost.png")
    print_rows(rows, best, token, title)
    told = {key: result[key] for key in ("benchmark", "plain_ms", "plain_share_of_bandwidth", "best", "real")}
    print(json.dumps(told | {"out": str(out)}))


main = hydra_command(run, "round_cost")

if __name__ == "__main__":
    main()
