"""The table of a sweep's points, and the words that belong to it, for the page and the terminal."""

from rich.table import Table

from specdec.cli.terminal import console, print_table
from specdec.lab.sweep.store import by_drafter, groups, tree_name
from specdec.sampling_settings import FILTERS, PENALTIES, Sampling

COLUMNS = {  # of the table of points: heading -> is it a number?
    "drafter": False,
    "tree": False,
    "tau": True,
    "95 %": True,
    "accepted to depth 1, 2, ..., % of all rounds": False,
    "draft, verify: ms a round": True,
    "tokens/s": True,
    "to plain": True,
    "identical": True,
}
OPTIONAL = ("draft, verify: ms a round", "95 %", "accepted to depth 1, 2, ..., % of all rounds")


def decoded(group: list[dict]) -> list[dict]:
    """The points of a group that decoded with a drafter."""
    return [r for r in group if r["kind"] == "decode" and "skipped" not in r and r["names"]["draft"] != "none"]


def title_of(group: list[dict]) -> str:
    """Return a group's title: benchmark, target and temperature."""
    names, sampling = group[0]["names"], group[0]["settings"]["sampling"]
    temperature = sampling.get("temperature", 0)
    how = f"temperature {temperature:g}" if temperature else "greedy"
    return f"{names['benchmark']}, {names['target']}, {how}"


def conditions_of(group: list[dict]) -> str:
    """Return a group's settings in one sentence."""
    names, s = group[0]["names"], group[0]["settings"]
    sampling = Sampling(**s["sampling"])  # what older results do not have was off
    shown = [name for name in FILTERS if not sampling.active.isdisjoint(FILTERS)]  # all, if one is on
    shown += [name for name in PENALTIES if name in sampling.active]
    words = [f"{names['questions']} questions", f"{s['max_new_tokens']} new tokens a turn"]
    words += [f"{name} {getattr(sampling, name):g}" for name in shown]
    words += [f"batch size {s['batch_size']}", s["dtype"], s["device"], "raw prompts" if s["raw"] else "chat template"]
    if (precision := s.get("matmul_precision", "highest")) != "highest":
        words.append(f"products of {precision} precision")
    words += [f"{name} {value}" for name, value in s["template"].items()]
    return ", ".join(words) + "."


def notes_of(group: list[dict], timings: dict[str, dict]) -> list[str]:
    """What must be known before a number of this group is believed."""
    points, unusable = decoded(group), group[0]["names"]["skipped_records"]
    left_out = max((r["turns_left_out"] for r in points), default=0)
    lossy = sorted({r["settings"]["tree"]["verifier"] for r in points if not r["names"]["lossless"]})
    different = sum(r.get("identical", r["rows"]) < r["rows"] for r in points)
    busy = sum(t["load"] > t["machine"]["cores"] for t in (timings[r["key"]] for r in group) if "load" in t)
    notes = [
        (unusable, f"{unusable} records of the benchmark could not be used."),
        (left_out, f"Turns left out because they do not fit the target's context: {left_out}."),
        (lossy, f"Lossy: {', '.join(lossy)} does not keep the target's distribution."),
        (different, f"Points with answers that differ from plain decoding's: {different}."),
        (busy, f"The load exceeded the number of cores while {busy} points were measured: do not compare times."),
    ]
    return [note for applies, note in notes if applies]


def table_of(group: list[dict], timings: dict[str, dict]) -> list[dict]:
    """A row {"cells", "best"} for each decoded point, plain decoding first. best: the drafter's fastest point."""
    points = decoded(group)
    plain = [r for r in group if r["kind"] == "decode" and r["names"]["draft"] == "none"]
    rates = {r["key"]: timings[r["key"]]["tokens_per_second"] for r in plain + points}
    base = rates[plain[0]["key"]] if plain else None
    fastest = {max((r["key"] for r in mine), key=rates.__getitem__) for mine in by_drafter(points).values()}
    return [{"cells": _cells(r, timings[r["key"]], base), "best": r["key"] in fastest} for r in plain + points]


def _cells(r: dict, timing: dict, base: float | None) -> list[str]:
    tau, rate = r["metrics"]["tau"], timing["tokens_per_second"]
    spent = timing["milliseconds_a_round"]
    plainly = r["names"]["draft"] == "none"
    rates = [e["value"] for e in r["by_depth"]["acceptance_by_depth"] if e["value"] is not None]
    return [
        "plain decoding" if plainly else r["names"]["draft"],
        "" if plainly else tree_name(r),
        f"{tau['value']:.2f}",
        "" if tau["low"] is None or plainly else f"{tau['low']:.2f}–{tau['high']:.2f}",
        " ".join(f"{100 * share:.0f}" for share in rates),
        f"{spent['draft']:.2f}, {spent['verify']:.2f}",
        f"{rate:.0f}",
        f"{rate / base:.2f}" if base else "",
        "" if plainly or "identical" not in r else f"{r['identical']} of {r['rows']}",
    ]


def print_tables(results: list[dict], timings: dict[str, dict]) -> None:
    """Print a table and its notes for each group of points."""
    screen = console(160)
    for group in groups(results):
        table = Table(title=f"{title_of(group)}: {conditions_of(group)}")
        for name, number in COLUMNS.items():
            table.add_column(name, justify="right" if number else "left")
        for row in table_of(group, timings):
            table.add_row(*row["cells"])
        print_table(screen, table, OPTIONAL)
        for note in notes_of(group, timings):
            screen.print(note)
