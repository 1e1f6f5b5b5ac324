"""Traces on disk.

A trace is a folder of four files, whose schema docs/trace.md documents: trace.json (settings, versions, and the digests
of the others), rows.jsonl, rounds.jsonl, nodes.safetensors.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path

import torch
from safetensors.torch import save_file

from specdec.cli.files import check_makeable, check_replaceable, replace_folder
from specdec.cli.reading import Model, check_length, lines_of, parse_json, read_model
from specdec.engine.recorder import NODE_FIELDS, Trace, TracedRound, TracedRow, TracedTree
from specdec.model.checkpoint import read_file
from specdec.model.weight_files import read_json
from specdec.schema import shown

FORMAT, VERSION = "specdec trace", 1
HEADER = "trace.json"
MOST_LINE = 1 << 24  # bytes: a prompt of two million tokens
FILES = ROWS, ROUNDS, NODES = "rows.jsonl", "rounds.jsonl", "nodes.safetensors"


def check_trace_folder(folder: Path) -> None:
    """Raise ValueError if a trace cannot be written to the folder because of its content."""
    check_replaceable(Path(folder), (HEADER, *FILES), "a trace")
    check_makeable(Path(folder))


def write_trace(trace: Trace, folder: Path) -> None:
    """Write a trace, completely or not at all; an older trace is replaced.

    Raises ValueError if the folder holds anything else, or cannot be written.
    """
    rounds = [(number, r) for number, row in enumerate(trace.rows) for r in row.rounds]
    trees = [r.tree for _, r in rounds if r.tree is not None]
    nodes = {name: torch.cat([vars(t)[name] for t in trees] or [torch.empty(0)]) for name in NODE_FIELDS}

    def fill(staging: Path) -> None:
        _write_lines(staging / ROWS, [_row_line(row) for row in trace.rows])
        _write_lines(staging / ROUNDS, [_round_line(number, r) for number, r in rounds])
        save_file(nodes, staging / NODES)
        header = {
            "format": FORMAT,
            "version": VERSION,
            "settings": trace.settings,
            "versions": trace.versions,
            "sha256": {name: _digest(staging / name) for name in FILES},
        }
        (staging / HEADER).write_text(json.dumps(header, indent=1) + "\n", encoding="utf-8")

    replace_folder(Path(folder), fill, (HEADER, *FILES), "a trace")


def read_trace(folder: Path) -> Trace:
    """Read a trace. Raises ValueError if there is no trace, or one of another version, or a damaged one."""
    folder = Path(folder)
    if not (folder / HEADER).is_file():
        raise ValueError(f"{folder} is not a trace: it has no {HEADER}")
    from specdec.engine.trace_lines import Header, RoundLine, RowLine  # here: only readers need pydantic

    content = read_json(folder / HEADER)
    if content.get("format") != FORMAT or "version" not in content:
        raise ValueError(f"{folder / HEADER} is not the header of a trace: record the trace anew")
    if content["version"] != VERSION:
        raise ValueError(
            f"{folder} is a trace of version {shown(content['version'])}, and this program reads version {VERSION}: "
            "record it anew"
        )
    header = read_model(Header, content, str(folder / HEADER))
    for name in FILES:
        file = folder / name
        if not file.is_file() or _digest(file) != header.sha256.get(name):
            raise ValueError(f"{file} is {'damaged' if file.is_file() else 'missing'}: record the trace anew")
    rows = [TracedRow(**{**dict(line), "seed": tuple(line.seed)}) for _, line in _read_lines(folder / ROWS, RowLine)]
    lines = list(_read_lines(folder / ROUNDS, RoundLine))
    trees = _read_trees(folder / NODES, [line.nodes for _, line in lines])
    for (where, line), tree in zip(lines, trees, strict=True):
        if line.row >= len(rows):
            raise ValueError(f"{where}: row must be below the {len(rows)} lines of {ROWS}, got {line.row}")
        row, values = rows[line.row], dict(line)
        del values["row"], values["nodes"]
        _check_tree(tree, line.path, row.steps, where)
        row.rounds.append(TracedRound(**values, tree=tree))
    return Trace(header.settings, header.versions, rows)


def _read_trees(file: Path, sizes: list[int]) -> list[TracedTree | None]:
    """Return the trees of these numbers of nodes, 0 for none, which a file holds one after the other."""
    nodes = dict(read_file(file))
    for name in NODE_FIELDS:
        dtype = torch.int32 if name in ("tokens", "parents") else torch.float32
        found = nodes.get(name)
        if found is None or found.shape != (sum(sizes),) or (found.dtype != dtype and sum(sizes) > 0):
            what = "missing" if found is None else f"{str(found.dtype)[6:]} {list(found.shape)}"
            raise ValueError(f"{file}: tensor {name} must be {str(dtype)[6:]} [{sum(sizes)}], as {ROUNDS} says: {what}")
    parts = zip(*(nodes[name].split(sizes) for name in NODE_FIELDS), strict=True)
    return [TracedTree(*part) if size else None for part, size in zip(parts, sizes, strict=True)]


def _check_tree(tree: TracedTree | None, path: list[int], steps: int, where: str) -> None:
    """Raise ValueError unless parents precede their children, and each node of the path is a child of the last."""
    if len(path) > steps + 1:
        raise ValueError(f"{where}: path must have at most {steps + 1} nodes, as the row's steps say, got {len(path)}")
    if tree is None:
        return
    parents = tree.parents
    before = torch.arange(len(parents), dtype=parents.dtype).sub_(1).clamp_(min=0)
    if (parents < 0).any() or (parents > before).any() or (tree.tokens < 0).any():
        raise ValueError(f"{where}: tokens and parents in {NODES} are no tree of its {len(parents)} nodes")
    if parents[path[1:]].tolist() != path[:-1]:
        raise ValueError(f"{where}: path must go from parents to children, got {shown(path)}")


def _row_line(row: TracedRow) -> dict:
    return {f.name: vars(row)[f.name] for f in fields(row) if f.name != "rounds"} | {"sampling": asdict(row.sampling)}


def _round_line(row: int, r: TracedRound) -> dict:
    line = {} if r.experts is None else {"experts": r.experts}
    line |= {"row": row, "nodes": 0 if r.tree is None else len(r.tree.tokens)}
    return line | {name: vars(r)[name] for name in ("context", "path", "emitted", "seconds")}


def _write_lines(file: Path, lines: list[dict]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def _read_lines(file: Path, model: type[Model]) -> Iterator[tuple[str, Model]]:
    """Yield the place and the content of each line."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines_of(lines, MOST_LINE), 1):
            where = f"{file} line {number}"
            check_length(line, where, MOST_LINE)
            yield where, read_model(model, parse_json(line, where), where)


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
