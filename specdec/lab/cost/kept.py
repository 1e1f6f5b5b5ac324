"""Measured costs, cached in a file for each machine, pair of shapes and version of the code.

A time depends on shapes and not on the text, so one measurement serves every text.
"""

import hashlib
import json

import torch

from specdec.cli.files import Kept
from specdec.cli.revision import code_digest
from specdec.engine.recorder import versions
from specdec.lab.cost.model import CostModel
from specdec.lab.cost.rounds import RoundCost, measure_rounds
from specdec.lab.machine import machine
from specdec.trees.spec import TreeSpec

TIMED_CODE = ("specdec", "specdec/drafters", "specdec/trees")  # folders of what is timed, and of what times it


def identity(target, drafter, **how) -> dict:
    """Return all that measured times depend on: machine, versions, source, shapes of the pair, how it was measured."""
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
        "source": code_digest(TIMED_CODE),
        "pair": hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest(),
        "how": how | {"trees": trees},
    }


def measured_costs(target, drafter, text: list[int], *, remeasure: bool = False, progress=None, **how) -> CostModel:
    """Return the costs of a pair on this machine, from the cache if they are there, else measured and cached.

    Args:
        text, progress, how: As for `measure_rounds`.
        remeasure: Measure even where costs are cached.
    """
    measured = Kept("costs", identity(target, drafter, **how))
    if not remeasure and (kept := measured.read(_model)) is not None:
        return kept
    costs = measure_rounds(target, drafter, text, **how, **({"progress": progress} if progress else {}))
    measured.write({"points": [vars(cost) | {"tree": None if cost.tree is None else str(cost.tree)} for cost in costs]})
    return CostModel(costs)


def _model(kept: dict) -> CostModel:
    points = [
        point | {"tree": None if point["tree"] is None else TreeSpec.parse(point["tree"])} for point in kept["points"]
    ]
    return CostModel([RoundCost(**point) for point in points])
