"""Traces on disk.

A trace is a folder of four files, whose schema docs/trace.md documents: trace.json (settings, versions, and the digests
of the others), rows.jsonl, rounds.jsonl, nodes.safetensors.
"""

import hashlib
import json
from dataclasses import asdict, fields
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from specdec.cli.files import check_makeable, check_replaceable, replace_folder
from specdec.cli.reading import parse_json
from specdec.engine.recorder import NODE_FIELDS, Trace, TracedRound, TracedRow, TracedTree
from specdec.model.weight_files import read_json
from specdec.structs import Sampling

FORMAT, VERSION = "specdec trace", 1
HEADER = "trace.json"
FILES = ROWS, ROUNDS, NODES = "rows.jsonl", "rounds.jsonl", "nodes.safetensors"


def check_trace_folder(folder: Path) -> None:
    """Raise ValueError if no trace can be written there for what it holds."""
    check_replaceable(Path(folder), (HEADER, *FILES), "a trace")
    check_makeable(Path(folder))


def write_trace(trace: Trace, folder: Path) -> None:
    """Write a trace, whole or not at all; an older one is replaced. ValueError if the folder holds anything else, or
    cannot be written."""
    rounds = [(number, r) for number, row in enumerate(trace.rows) for r in row.rounds]
    trees = [r.tree for _, r in rounds if r.tree is not None]
    nodes = {name: torch.cat([vars(t)[name] for t in trees] or [torch.empty(0)]) for name in NODE_FIELDS}

    def fill(aside: Path) -> None:
        _write_lines(aside / ROWS, [_row_line(row) for row in trace.rows])
        _write_lines(aside / ROUNDS, [_round_line(number, r) for number, r in rounds])
        save_file(nodes, aside / NODES)
        header = {
            "format": FORMAT,
            "version": VERSION,
            "settings": trace.settings,
            "versions": trace.versions,
            "sha256": {name: _digest(aside / name) for name in FILES},
        }
        (aside / HEADER).write_text(json.dumps(header, indent=1) + "\n", encoding="utf-8")

    replace_folder(Path(folder), fill, (HEADER, *FILES), "a trace")


def read_trace(folder: Path) -> Trace:
    """Raises ValueError, one sentence, if there is no trace, or one of another version, or a damaged one."""
    folder = Path(folder)
    if not (folder / HEADER).is_file():
        raise ValueError(f"{folder} is not a trace: it has no {HEADER}")
    header = read_json(folder / HEADER)
    parts = [header.get(name) for name in ("settings", "versions", "sha256")]
    if header.get("format") != FORMAT or "version" not in header or not all(isinstance(part, dict) for part in parts):
        raise ValueError(f"{folder / HEADER} is not the header of a trace: record the trace anew")
    if header["version"] != VERSION:
        raise ValueError(
            f"{folder} is a trace of version {header['version']}, and this program reads version {VERSION}: "
            "record it anew"
        )
    for name in FILES:
        file = folder / name
        if not file.is_file() or _digest(file) != header["sha256"].get(name):
            raise ValueError(f"{file} is {'damaged' if file.is_file() else 'missing'}: record the trace anew")
    nodes = load_file(folder / NODES)
    lines = _read_lines(folder / ROUNDS)
    trees = zip(*(nodes[name].split([line["nodes"] for line in lines]) for name in NODE_FIELDS), strict=True)
    rows = [_row(line) for line in _read_lines(folder / ROWS)]
    for line, parts in zip(lines, trees, strict=True):
        row, count = line.pop("row"), line.pop("nodes")
        rows[row].rounds.append(TracedRound(**line, tree=TracedTree(*parts) if count else None))
    return Trace(header["settings"], header["versions"], rows)


def _row(line: dict) -> TracedRow:
    """Of a file's line; one that is older than the seeds of rows has none."""
    return TracedRow(**line | {"sampling": Sampling(**line["sampling"]), "seed": tuple(line.get("seed", (0, 0)))})


def _row_line(row: TracedRow) -> dict:
    return {f.name: vars(row)[f.name] for f in fields(row) if f.name != "rounds"} | {"sampling": asdict(row.sampling)}


def _round_line(row: int, r: TracedRound) -> dict:
    experts = {} if r.experts is None else {"experts": r.experts}
    return experts | {
        "row": row,
        "nodes": 0 if r.tree is None else len(r.tree.tokens),
        "context": r.context,
        "path": r.path,
        "emitted": r.emitted,
        "seconds": r.seconds,
    }


def _write_lines(file: Path, lines: list[dict]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def _read_lines(file: Path) -> list[dict]:
    return [parse_json(line, str(file)) for line in file.read_text(encoding="utf-8").splitlines()]


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
