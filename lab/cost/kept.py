"""Measured costs, kept in a file for each machine, pair of shapes and version of the code.

A time depends on shapes, not on what was said, so one measurement serves every text.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from lab.cost.model import CostModel
from lab.cost.rounds import RoundCost, measure_rounds
from lab.machine import machine
from specdec.cli.files import kept_file, output_folder, write_text
from specdec.engine.recorder import versions
from trees.spec import TreeSpec

TIMED_CODE = (
    "specdec",
    "drafters",
    "trees",
    "lab/cost",
)  # folders of what is timed, and of what times it


def identity(target, drafter, **how) -> dict:
    """Everything that measured times depend on: machine, versions, source, shapes of the pair, how it was measured."""
    source = hashlib.sha256()
    for folder in TIMED_CODE:
        for file in sorted((Path(__file__).parents[2] / folder).rglob("*.py")):
            source.update(file.read_bytes())
    shapes = {
        name: [(key, list(value.shape), str(value.dtype)) for key, value in module.state_dict().items()]
        for name, module in (("target", target), ("drafter", drafter))
        if isinstance(module, torch.nn.Module)
    }
    trees = [str(t) if t.paths else t.path.read_text(encoding="utf-8") for t in how.get("statics", ())]
    known = {"drafter": type(drafter).__name__, "conventions": dict(drafter.conventions), **shapes}
    return {
        "machine": machine(target.device),
        "versions": versions(),
        "source": source.hexdigest(),
        "pair": hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest(),
        "how": how | {"trees": trees},
    }


def cache_file(who: dict) -> Path:
    """The file of this identity's measurements."""
    return kept_file("costs", who)


def save_costs(costs: Sequence[RoundCost], file: Path, who: dict) -> None:
    content = {"identity": who, "points": [_entries(cost) for cost in costs]}
    output_folder(file.parent)
    write_text(file, json.dumps(content, indent=1, default=str) + "\n")


def load_costs(file: Path) -> list[RoundCost]:
    """Raises ValueError, one sentence, if the file does not hold measured costs."""
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))["points"]
        return [RoundCost(_tree(row.pop("setting")), **row) for row in rows]
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{file} holds no measured costs: measure anew with --remeasure") from None


def _entries(cost: RoundCost) -> dict:
    return {
        "setting": None if cost.tree is None else str(cost.tree),
        "context": cost.context,
        "batch": cost.batch,
        "seconds": cost.seconds,
    }


def _tree(text: str | None) -> TreeSpec | None:
    return None if text is None else TreeSpec.parse(text)


def measured_costs(target, drafter, text: list[int], *, remeasure: bool = False, progress=None, **how) -> CostModel:
    """The costs of a pair on this machine: read where they are kept, else measured and kept.

    text, progress, how: as in `measure_rounds`. remeasure: measure even where costs are kept."""
    who = identity(target, drafter, **how)
    file = cache_file(who)
    if file.is_file() and not remeasure:
        return CostModel(load_costs(file))
    costs = measure_rounds(target, drafter, text, **how, **({"progress": progress} if progress else {}))
    save_costs(costs, file, who)
    return CostModel(costs)
