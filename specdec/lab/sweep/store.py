"""The folder of a sweep: what its points measured, put together in a fixed order, and as tables.

Each point has a folder points/KEY/, written whole or not at all:
    result.json   what was decoded: settings, metrics with intervals, diagnostics; the same in every run
    times.json    how long it took, and on what machine
    trace/        the trace (docs/trace.md)
The first two files hold a digest of themselves (`sha256`), by which damage and edits are found. results.jsonl and
timings.jsonl hold their content, a line a point.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from rich.table import Column, Table

from specdec.cli.files import replace_folder, write_text
from specdec.cli.lock import only_writer
from specdec.cli.terminal import console, print_table
from specdec.engine.recorder import Recorder
from specdec.engine.trace_files import write_trace
from specdec.lab.sweep.points import SweepPoint, code_version
from specdec.model.weight_files import read_json
from specdec.sampling_settings import FILTERS, PENALTIES, Sampling
from specdec.verify import sample_and_match

POINT = RESULT, TIMES, TRACE = "result.json", "times.json", "trace"
RESULTS, TIMINGS = "results.jsonl", "timings.jsonl"
DEPTHS, PARTS = "accepted to depth 1, 2, ..., % of all rounds", "draft, verify: ms a round"
COLUMNS = {  # of the table of points: heading -> is it a number?
    "drafter": False, "tree": False, "tau": True, "95 %": True, DEPTHS: False, PARTS: True, "tokens/s": True,
    "to plain": True, "identical": True,
}  # fmt: skip
OPTIONAL = (PARTS, "95 %", DEPTHS)


def point_folder(out: Path, key: str) -> Path:
    """Return the folder of the point with this key. The point is done if its result is there."""
    return out / "points" / key


def write_point(out: Path, point: SweepPoint, found: dict, took: dict, recorder: Recorder | None = None) -> None:
    """Write a point's folder whole or not at all: its result `found`, its times `took` and the recorder's trace."""
    head = {"kind": point.kind, "key": point.key, "names": point.names, "settings": point.settings}

    def fill(staging: Path) -> None:
        if recorder is not None:
            write_trace(recorder.trace, staging / TRACE)
        for name, content in ((TIMES, {"key": point.key} | took), (RESULT, head | found)):
            text = json.dumps(content | {"sha256": _digest(content)})
            (staging / name).write_text(text + "\n", encoding="utf-8")

    replace_folder(point_folder(out, point.key), fill, POINT, "a sweep's point")


def collect(out: Path) -> tuple[list[dict], dict[str, dict], int]:
    """All points in a sweep's folder: (results in a fixed order, times by key, number of points left out).

    Points that another version of the code made do not compare, and are left out. A result gets an entry
    `identical` if there is plain decoding of the same questions and the rule draws as that does: how many answers are
    the same.
    """
    folders = sorted(p.parent for p in (out / "points").glob(f"*/{RESULT}") if not p.parent.suffix)
    now = code_version()
    found = [both for folder in folders if (both := _read_point(folder, now)) is not None]
    current, times = [result for result, _ in found], {result["key"]: took for result, took in found}
    plain = {_conditions(r): r.get("answers") for r in current if r["names"]["draft"] == "none"}
    for r in current:
        answers = r.pop("answers", None)
        base = plain.get(_conditions(r))
        greedy = not r["settings"]["sampling"].get("temperature")
        settled = greedy or r["settings"].get("tree", {}).get("verifier") == str(sample_and_match)
        if answers is not None and base is not None and settled:
            r["identical"] = sum(a == b for a, b in zip(answers, base, strict=False))
    _distinguish(current)
    current.sort(key=_order)
    return current, {r["key"]: times[r["key"]] for r in current}, len(folders) - len(current)


def _distinguish(results: list[dict]) -> None:
    """Append to drafters of one name in one table the settings in which they differ, such as weights or verifier."""
    for points in [mine for group in groups(results) for mine in by_drafter(group).values()]:
        own = [r["settings"] | r["settings"].get("draft", {}) | r["settings"].get("tree", {}) for r in points]
        for field in ("weights", "token_map", "feedback", "verifier", "sampled", "probe"):
            if len({str(settings[field]) for settings in own if field in settings}) > 1:
                for r, settings in zip(points, own, strict=True):
                    r["names"]["draft"] += f", {field} {settings[field]}" if field in settings else ""


def _read_point(folder: Path, now: str) -> tuple[dict, dict] | None:
    """A point's result and times; None if other code made it. Raises ValueError for damaged or edited files."""
    try:
        result, times = (read_json(folder / name) for name in (RESULT, TIMES))
        for name, content in ((RESULT, result), (TIMES, times)):
            if content.pop("sha256", None) != _digest(content) or content["key"] != folder.name:
                raise ValueError(f"{folder / name} is not as the sweep wrote it")
    except ValueError as error:
        raise ValueError(f"{error}; remove {folder}, and the sweep measures this point anew") from None
    return (result, times) if result["settings"]["code"] == now else None


def _digest(content: dict) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _conditions(result: dict) -> str:
    """What two points share that answer the same questions in the same way, with any drafter and tree."""
    own = ("draft", "tree", "probe", "best_tree")
    return json.dumps({k: v for k, v in result["settings"].items() if k not in own}, sort_keys=True)


def _grouped(results: list[dict], key: Callable[[dict], str]) -> dict[str, list[dict]]:
    found: dict[str, list[dict]] = {}
    for r in results:
        found.setdefault(key(r), []).append(r)
    return found


def groups(results: list[dict]) -> list[list[dict]]:
    """The results by target, benchmark and way to decode, in order."""
    return list(_grouped(results, _conditions).values())


def by_drafter(points: list[dict]) -> dict[str, list[dict]]:
    """The points of each drafter, in order of appearance."""
    return _grouped(points, lambda r: r["names"]["draft"])


def _order(result: dict) -> tuple:
    tree = result["settings"].get("tree") or {}
    names = result["names"]
    shape = [tree.get(name) or 0 for name in ("topk", "steps", "num_draft_tokens")]
    return (names["target"], names["benchmark"], _conditions(result), names["draft"] != "none", names["draft"],
            result["kind"] == "best_tree", shape, result["key"])  # fmt: skip


def write_results(out: Path) -> tuple[list[dict], dict[str, dict], int]:
    """Write results.jsonl and timings.jsonl of all points in the folder, and return what `collect` returns.

    results.jsonl is the same however often the sweep was interrupted. Several sweeps may share a folder: the last one
    to finish writes the points of all.
    """
    with only_writer(out, inside=True, wait=True):
        results, timings, old = collect(out)
        for name, lines in ((RESULTS, results), (TIMINGS, timings.values())):
            write_text(out / name, "".join(json.dumps(line) + "\n" for line in lines))
    return results, timings, old


def counts_of(results: list[dict]) -> dict[str, int]:
    """Return the number of decoded points, each a row of a table, and that of best trees, one for each drafter."""
    measured = [r["kind"] for r in results if "skipped" not in r]
    return {"points": measured.count("decode"), "best_trees": measured.count("best_tree")}


def tree_name(r: dict) -> str:
    """Return a tree's name: 'chain STEPS', or 'TOPK/STEPS/NUM_DRAFT_TOKENS', after 'block ' for a block drafter.

    Other trees have the name that the command gave.
    """
    tree = r["settings"]["tree"]
    if "shape" in tree:
        return r["names"]["tree"]
    if tree["topk"] == 1:
        return f"chain {tree['steps']}"
    return f"{'block ' if tree.get('block') else ''}{tree['topk']}/{tree['steps']}/{tree['num_draft_tokens'] or '-'}"


def tau(r: dict) -> dict:
    """Tau with its interval: {"value", "low", "high"}."""
    return r["metrics"]["tau"]


def best(points: list[dict]) -> dict:
    """The point with the greatest tau; of equal ones the first."""
    return max(points, key=lambda r: tau(r)["value"] or 0.0)


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
        columns = (Column(name, justify="right" if number else "left") for name, number in COLUMNS.items())
        table = Table(*columns, title=f"{title_of(group)}: {conditions_of(group)}")
        for row in table_of(group, timings):
            table.add_row(*row["cells"])
        print_table(screen, table, OPTIONAL)
        for note in notes_of(group, timings):
            screen.print(note)
