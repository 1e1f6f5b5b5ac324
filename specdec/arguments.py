"""Arguments of the Python interface: what each may be, and one sentence with the right name for anything else."""

from collections import abc
from collections.abc import Mapping
from dataclasses import fields
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from torch import nn

from specdec.children import KINDS
from specdec.contracts import Drafter, TreePolicy
from specdec.drafters.formats import load_drafter
from specdec.engine.adaptive import Policy
from specdec.engine.compatibility import check_settings
from specdec.engine.sequence import is_seed
from specdec.model.language_model import LanguageModel
from specdec.model.loader import is_transformers, load_target
from specdec.schema import check_value, nearest, shown, typed
from specdec.structs import Sampling, Verifier
from specdec.trees.base import WORDS
from specdec.trees.spec import STEPS, checked, make_tree, parse_tree
from specdec.verify import make_verifier

if TYPE_CHECKING:
    from transformers import PreTrainedModel

REQUEST = ("max_new_tokens", "stop", "json_schema", "logprobs", "seed", "raw")  # of `answer`, besides the sampling
TYPES: dict[str, Any] = {
    "max_new_tokens": int | list[int] | tuple[int],
    "stop": str | list | tuple,
    "json_schema": Mapping | bool | None,
    "logprobs": bool,
    "seed": int | list | tuple,
    "raw": bool,
    "children": str | None,
    "topk": int | None,
    "steps": int | None,
    "num_draft_tokens": int | None,
    "trials": int,
}


def plain(value: Any) -> Any:
    """Return a number of NumPy, and those in a list, as one of Python; anything else as it is."""
    if isinstance(value, list | tuple):
        return list(map(plain, value))
    return value.item() if isinstance(value, np.generic) else value


def check_types(**given: Any) -> None:
    """Raise ValueError for the first argument whose type is not that of `TYPES`."""
    for name, value in given.items():
        if value is not None and isinstance(value, type):
            raise ValueError(f"{name} is the class {value.__name__}: give one of its objects")
        if name in TYPES:
            check_value(typed(TYPES[name]), plain(value), name)
    check_settings(**{name: given[name] for name in ("compile", "graphs") if name in given})
    if not isinstance(adaptive := given.get("adaptive"), str | Policy | None):
        raise ValueError(f"adaptive must be the name of a policy, or a policy, got {shown(adaptive)}")
    if isinstance(seeds := plain(given.get("seed")), list | tuple) and not all(map(is_seed, seeds)):
        raise ValueError(f"each seed must be a whole number or two of them, got {shown(seeds)}")
    if given.get("children") not in (None, *KINDS):
        raise ValueError(f"children must be one of {', '.join(KINDS)}, got {shown(given['children'])}")
    observer = given.get("observer")
    if observer is not None and not callable(observer):
        raise ValueError(f"observer must be a function of a RoundReport, got {shown(observer)}")


def check_prompts(prompts: Any, order: str) -> None:
    """Raise TypeError for what cannot be prompts, ValueError for an empty list. order: how the function is called."""
    if isinstance(prompts, abc.Sequence) and not isinstance(prompts, bytes):
        if not prompts and not isinstance(prompts, str):
            raise ValueError("no prompt was given")
        return
    if isinstance(prompts, np.ndarray) or hasattr(prompts, "tolist"):
        raise TypeError(f"prompts must be lists of token ids, got {shown(prompts)}: call its tolist()")
    message = "; messages stand in a list" if isinstance(prompts, Mapping) else f"; the order is {order}"
    raise TypeError(f"prompts must be a text, messages or token ids, or a list of these, got {shown(prompts)}{message}")


def as_target(target: "LanguageModel | PreTrainedModel | str | Path") -> LanguageModel:
    """Return a target; a name is loaded, and a model of transformers is taken as it is in memory."""
    if isinstance(target, Drafter):
        raise TypeError(f"target is the drafter {shown(target)}: the target comes first, then the drafter")
    if isinstance(target, nn.Module):
        return load_target(target) if is_transformers(target) else cast(LanguageModel, target)
    if not isinstance(target, str | Path):
        raise TypeError(f"target must be a model or its name, such as demo/target, got {shown(target)}")
    return load_target(target)


def as_drafter(drafter: "Drafter | PreTrainedModel | str | Path | None", target: LanguageModel) -> Drafter | None:
    """Return a drafter; a name is loaded, and a model of transformers becomes a draft model."""
    check_drafter(drafter)
    return drafter if drafter is None or isinstance(drafter, Drafter) else load_drafter(drafter, target)


def check_drafter(drafter: Any) -> None:
    """Raise TypeError for what can be no drafter."""
    if isinstance(drafter, nn.Module) and not isinstance(drafter, Drafter) and not is_transformers(drafter):
        raise TypeError(f"drafter is the target {shown(drafter)}: give a drafter or its name, such as demo/mtp")
    if not isinstance(drafter, Drafter | nn.Module | str | Path | None):
        raise TypeError(f"drafter must be a drafter or its name, such as demo/mtp, got {shown(drafter)}")


def as_tree(tree: Any, drafter: Drafter | None, **words: int | None) -> TreePolicy | None:
    """Return a tree policy, or None for plain decoding. words: topk, steps and num_draft_tokens instead of `tree`.

    Without either it is the default tree, with no more levels than the drafter can draft.
    """
    given: dict[str, Any] = {name: value for name, value in words.items() if value is not None}
    if tree is not None and given:
        raise ValueError(f"{next(iter(given))} contradicts tree: give one of the two")
    if isinstance(tree, str | Path):
        return parse_tree(tree)
    if isinstance(tree, abc.Sequence):
        if len(tree) != len(WORDS) or not all(isinstance(n, Integral) and not isinstance(n, bool) for n in tree):
            raise ValueError(f"tree must be the three numbers topk, steps, num_draft_tokens, got {shown(tree)}")
        return make_tree(*tree)
    if tree is None and drafter is not None:
        return make_tree(**{"steps": drafter.deepest(STEPS)} | given)
    if tree is None and given:
        raise ValueError(f"{next(iter(given))} is of the draft tree: give a drafter too")
    if tree is not None and not hasattr(tree, "grow"):
        raise TypeError(f"tree must be a text such as 4/5/16, three numbers or a tree, got {shown(tree)}")
    return None if tree is None else checked(type(tree).__name__, tree)


def as_verifier(verifier: Verifier | str) -> Verifier:
    """Return a verifier; a name of conf/verifier is made."""
    if not isinstance(verifier, str) and not (callable(verifier) and hasattr(verifier, "couples")):
        raise TypeError(f"verifier must be a name such as match, or a specdec.verify.Rule, got {shown(verifier)}")
    return make_verifier(verifier) if isinstance(verifier, str) else verifier


def as_sampling(
    sampling: Sampling | list[Sampling] | None, words: Mapping[str, Any]
) -> Sampling | list[Sampling] | None:
    """The sampling as it is or by the fields of `Sampling`. Raises ValueError for both at once or a wrong field."""
    known = {f.name: f for f in fields(Sampling)}
    if unknown := [name for name in words if name not in known]:
        raise ValueError(f"there is no setting {unknown[0]}; there is {nearest(unknown[0], [*known, *REQUEST])}")
    words = {name: plain(value) for name, value in words.items() if value is not None}
    for name, value in words.items():
        check_value(known[name], value, name)
    if words and sampling is not None:
        raise ValueError(f"{next(iter(words))} is a part of sampling: give one of the two")
    given = sampling if isinstance(sampling, list | tuple) else [sampling]
    if sampling is not None and not all(isinstance(one, Sampling) for one in given):
        raise ValueError(f"sampling must be a Sampling or a list of them, got {shown(sampling)}")
    return Sampling(**words) if words else sampling
