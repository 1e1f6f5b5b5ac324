"""The folder of a sweep: what its points measured, put together in a fixed order, and what tables ask of it.

Each point has a folder points/KEY/, written whole or not at all:
    result.json   what was decoded: settings, metrics with intervals, diagnostics; the same in every run
    times.json    how long it took, and on what machine
    trace/        the trace (docs/trace.md)
The first two files hold a digest of themselves (`sha256`), by which damage and edits are found. results.jsonl and
timings.jsonl hold their content, a line a point.
"""

import hashlib
import json
from functools import partial
from pathlib import Path

from specdec.cli.files import replace_folder, write_text
from specdec.cli.lock import only_writer
from specdec.engine.recorder import Recorder
from specdec.engine.trace_files import write_trace
from specdec.lab.sweep.points import SweepPoint, code_version
from specdec.model.weight_files import read_json
from specdec.verify import sample_and_match

POINT = RESULT, TIMES, TRACE = "result.json", "times.json", "trace"
RESULTS, TIMINGS = "results.jsonl", "timings.jsonl"


def point_folder(out: Path, key: str) -> Path:
    """Return the folder of the point with this key."""
    return out / "points" / key


def done(out: Path, point: SweepPoint) -> bool:
    """Return whether the point's result has been written."""
    return (point_folder(out, point.key) / RESULT).is_file()


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
    found = [both for both in map(partial(_read_point, now=now), folders) if both is not None]
    current, times = [result for result, _ in found], {result["key"]: took for result, took in found}
    plain = {_conditions(r): r.get("answers") for r in current if r["names"]["draft"] == "none"}
    for r in current:
        answers = r.pop("answers", None)
        base = plain.get(_conditions(r))
        if answers is not None and base is not None and _settled(r["settings"]):
            r["identical"] = sum(a == b for a, b in zip(answers, base, strict=False))
    current.sort(key=_order)
    timings = {r["key"]: times[r["key"]] for r in current}
    return current, timings, len(folders) - len(current)


def _read_point(folder: Path, now: str) -> tuple[dict, dict] | None:
    """What was measured at a point, and its times; None if another version of the code made it.

    Raises ValueError, one sentence, for files that were changed by hand or are damaged.
    """
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


def _settled(settings: dict) -> bool:
    greedy = not settings["sampling"].get("temperature")
    return greedy or settings.get("tree", {}).get("verifier") == str(sample_and_match)


def _conditions(result: dict) -> str:
    """What two points share that answer the same questions in the same way, with any drafter and tree."""
    own = ("draft", "tree", "probe", "best_tree")
    return json.dumps({k: v for k, v in result["settings"].items() if k not in own}, sort_keys=True)


def groups(results: list[dict]) -> list[list[dict]]:
    """The results by target, benchmark and way to decode, in order."""
    found: dict[str, list[dict]] = {}
    for r in results:
        found.setdefault(_conditions(r), []).append(r)
    return list(found.values())


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
            text = "".join(json.dumps(line) + "\n" for line in lines)
            write_text(out / name, text)
    return results, timings, old


def counts_of(results: list[dict]) -> dict[str, int]:
    """Return the number of decoded points, each a row of a table, and that of best trees, one for each drafter."""
    measured = [r["kind"] for r in results if "skipped" not in r]
    return {"points": measured.count("decode"), "best_trees": measured.count("best_tree")}


def by_drafter(points: list[dict]) -> dict[str, list[dict]]:
    """The points of each drafter, in order of appearance."""
    found: dict[str, list[dict]] = {}
    for r in points:
        found.setdefault(r["names"]["draft"], []).append(r)
    return found


def tree_name(r: dict) -> str:
    """Return a tree's name: 'chain STEPS', or 'TOPK/STEPS/NUM_DRAFT_TOKENS', after 'block ' for a block drafter."""
    tree = r["settings"]["tree"]
    if tree["topk"] == 1:
        return f"chain {tree['steps']}"
    return f"{'block ' if tree.get('block') else ''}{tree['topk']}/{tree['steps']}/{tree['num_draft_tokens'] or '-'}"


def tau(r: dict) -> dict:
    """Tau with its interval: {"value", "low", "high"}."""
    return r["metrics"]["tau"]


def best(points: list[dict]) -> dict:
    """The point with the greatest tau; of equal ones the first."""
    return max(points, key=lambda r: tau(r)["value"] or 0.0)
