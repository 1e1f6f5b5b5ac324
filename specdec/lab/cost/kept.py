"""Measured costs, kept in a file for each machine, pair of shapes and version of the code.

A time depends on shapes, not on what was said, so one measurement serves every text.
"""

import hashlib
import json
from pathlib import Path

import torch

from specdec.cli.files import Kept
from specdec.engine.recorder import versions
from specdec.lab.cost.model import CostModel
from specdec.lab.cost.rounds import RoundCost, measure_rounds
from specdec.lab.machine import machine
from specdec.trees.spec import TreeSpec

TIMED_CODE = ("specdec", "specdec/drafters", "specdec/trees")  # folders of what is timed, and of what times it


def identity(target, drafter, **how) -> dict:
    """Everything that measured times depend on: machine, versions, source, shapes of the pair, how it was measured."""
    source = hashlib.sha256()
    for folder in TIMED_CODE:
        for file in sorted((Path(__file__).parents[3] / folder).rglob("*.py")):
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


def _entries(cost: RoundCost) -> dict:
    return {
        "setting": None if cost.tree is None else str(cost.tree),
        "context": cost.context,
        "batch": cost.batch,
        "seconds": cost.seconds,
    }


def _model(kept: dict) -> CostModel:
    return CostModel([_cost(**point) for point in kept["points"]])


def _cost(setting: str | None, **entries) -> RoundCost:
    return RoundCost(None if setting is None else TreeSpec.parse(setting), **entries)


def measured_costs(target, drafter, text: list[int], *, remeasure: bool = False, progress=None, **how) -> CostModel:
    """The costs of a pair on this machine: read where they are kept, else measured and kept.

    text, progress, how: as in `measure_rounds`. remeasure: measure even where costs are kept."""
    measured = Kept("costs", identity(target, drafter, **how))
    if not remeasure and (kept := measured.read(_model)) is not None:
        return kept
    costs = measure_rounds(target, drafter, text, **how, **({"progress": progress} if progress else {}))
    measured.write({"points": [_entries(cost) for cost in costs]})
    return CostModel(costs)
