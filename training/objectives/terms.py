"""Terms of a loss, by name.

A term is a function (student, teacher, **settings) -> (value, slope, total), for n positions and J steps:

- value [n,J].
- slope, of a shape that broadcasts to [n,J,U]: d value / d log q_v, with the entries of log q taken as independent.
- total, of a shape that broadcasts to [n,J]: the sum of slope over v.

The gradient by the student's logits is slope - q total. So a multiple of q may be left out of slope and total alike. A
slope may be shared between terms: it is never written to.
"""

import pkgutil
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor

from specdec.cli.limits import MOST
from specdec.schema import check_value, parameters

Value = tuple[Tensor, Tensor, Tensor]
Term = Callable[..., Value]
Weight = float | Mapping[str, float | bool]

_FOUND: dict[str, Term] = {}


def term(function: Any) -> Any:
    """Decorator: `objective.terms` has the function under its own name."""
    _FOUND[function.__name__] = function
    return function


def all_terms() -> dict[str, Term]:
    """The terms of all files in training/objectives, by name."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        import_module(f"specdec.training.objectives.{module.name}")
    return dict(_FOUND)


def read_terms(terms: Mapping[str, Weight]) -> list[tuple[float, Term]]:
    """{name: weight} or {name: {weight: w, setting: value}} -> [(weight, term)]; ValueError for what is unknown."""
    known = all_terms()
    chosen: list[tuple[float, Term]] = []
    for name, value in terms.items():
        if name not in known:
            raise ValueError(f"objective.terms has no {name!r}; there are {', '.join(known)}")
        settings = dict(value) if isinstance(value, Mapping) else {"weight": value}
        weight, (taken, _) = settings.pop("weight", 1.0), parameters(known[name])
        for setting, given in settings.items():
            if setting not in taken or setting in ("student", "teacher"):
                names = ["weight", *list(taken)[2:]]
                raise ValueError(f"objective.terms.{name} has no setting {setting!r}; it has {names}")
            check_value(taken[setting], given, f"objective.terms.{name}.{setting}", {"low": 0, "high": MOST})
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < float("inf"):
            raise ValueError(f"objective.terms.{name} must have a weight of 0 or above, got {weight!r}")
        if weight:  # 0 takes a term out of a configuration that others are added to
            chosen.append((float(weight), partial(known[name], **settings)))
    if not chosen:
        raise ValueError(f"objective.terms needs a term of a weight other than 0; there are {', '.join(known)}")
    return chosen
