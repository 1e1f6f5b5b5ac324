"""One check of all that is set: a dataclass says names, types and ranges, and `check` holds values against it.

Config files of checkpoints, flags and settings files are checked by it, so that a wrong value is named before anything
is allocated, and so that wrong inputs can be generated from the same fields (`tests/cli/wrong_cases.py`).
"""

import difflib
import functools
import inspect
import math
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, field, fields, is_dataclass
from numbers import Integral, Real
from typing import Any, ParamSpec, TypeVar, get_args, get_origin

Given = ParamSpec("Given")
Found = TypeVar("Found")

SHOWN = 60  # characters of a wrong value that a message shows
WORDS = {bool: "true or false", str: "a text", dict: "a mapping", Mapping: "a mapping", list: "a list", tuple: "a list"}


MEANT = {  # names of other programs, and of other parts of this one -> ours
    "model": "target", "base_model": "target", "draft": "drafter", "draft_model": "drafter", "speculator": "drafter",
    "assistant_model": "drafter", "assistant": "drafter", "prompt": "prompts", "messages": "prompts", "text": "prompts",
    "inputs": "prompts", "max_tokens": "max_new_tokens", "max_length": "max_new_tokens", "num_steps": "steps",
    "num_speculative_tokens": "steps", "num_assistant_tokens": "steps", "eagle_topk": "topk", "width": "topk",
    "depth": "steps", "nodes": "num_draft_tokens", "stop_strings": "stop", "do_sample": "temperature",
    "drafters": "drafts", "name": "path", "folder": "path", "random_seed": "seed", "generator": "seed",
    "data_path": "data", "dataset": "data", "output_dir": "out", "max_steps": "steps", "num_epochs": "epochs",
}  # fmt: skip


def ranged(low: float, high: float, default: Any = MISSING, *, above: bool = False, **metadata) -> Any:
    """Return a field whose numbers lie between `low` and `high`, both included; above: `low` itself is too little."""
    limits = {"gt" if above else "ge": low, "le": high}  # as pydantic has them
    return field(default=default, metadata={"low": low, "high": high, "above": above, "limits": limits} | metadata)


def choice(*known: str) -> Any:
    """Return a field of a text that is one of these, by default the first."""
    return field(default=known[0], metadata={"choices": known})


def check_fields(settings: Any, prefix: str = "") -> None:
    """Raise ValueError for a field whose value is not of its type or range. prefix: of its name in the message."""
    for setting in fields(settings):
        check_value(setting, getattr(settings, setting.name), prefix + setting.name)


def typed(kind: Any) -> Field:
    """Return a field of this type that belongs to no dataclass, and has no range."""
    made = field()
    made.type = kind
    return made


def parameters(call: Callable) -> tuple[dict[str, Field], bool]:
    """Return the named parameters of a class or function as fields of their types, and whether it takes other names.

    `**settings` of a class stands for the parameters of its bases.
    """
    own = {f.name: f for f in fields(call)} if is_dataclass(call) else {}
    found: dict[str, Field] = {}
    inits = [vars(c)["__init__"] for c in call.__mro__ if "__init__" in vars(c)] if isinstance(call, type) else None
    for part in [call] if inits is None else inits:
        taken = list(inspect.signature(part).parameters.values())
        for one in taken:
            if one.name != "self" and one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY):
                kind = Any if one.annotation is one.empty else one.annotation
                found.setdefault(one.name, own.get(one.name) or typed(kind))
        if not any(one.kind is one.VAR_KEYWORD for one in taken):
            return found, False
    return found, True


def check(schema: Any, values: Mapping[str, Any], where: str, any_range: Collection[str] = ()) -> None:
    """Raise ValueError for the first value whose type or range is not that of the field of its name.

    Names that the schema does not have, and fields that have no value, are not checked. where: the container of the
    values, for the message; empty for none. any_range: fields of which only the type counts.
    """
    for setting in fields(schema):
        if setting.name in values:
            limits = {} if setting.name in any_range else setting.metadata
            check_value(setting, values[setting.name], f"{where}: {setting.name}" if where else setting.name, limits)


def check_value(setting: Field, value: Any, name: str, limits: Mapping[str, Any] | None = None) -> None:
    """Raise ValueError, which calls the value `name`, unless it fits the field's type and range, or `limits`."""
    kinds = kinds_of(setting.type)
    limits = setting.metadata if limits is None else limits
    if isinstance(value, int | float) and not isinstance(value, bool) and {int, float} & set(kinds):
        low, high = limits.get("low", -math.inf), limits.get("high", math.inf)
        if limits.get("above") and value <= low:
            raise ValueError(f"{name} must be above {low:g}, got {shown(value)}")
        if value < low:
            raise ValueError(f"{name} must be at least {low:.12g}, got {shown(value)}")
        if high < value < math.inf:
            most = high if isinstance(high, int) else f"{high:.12g}"
            raise ValueError(f"{name} must be at most {most}, got {shown(value)}")
    if value not in limits.get("choices", (value,)):
        raise ValueError(f"{name} must be one of {', '.join(limits['choices'])}, got {shown(value)}")
    if not any(_is(kind, value, limits) for kind in kinds):
        wanted = " or ".join(_wanted(kind, limits) for kind in kinds)
        raise ValueError(f"{name} must be {wanted}, got {shown(value)}")


def kinds_of(annotation: Any) -> tuple[Any, ...]:
    """Return the types of a union, in order; the type itself if it is no union."""
    if get_origin(annotation) in (types.UnionType, typing.Union):
        return get_args(annotation)
    return (annotation,)


def shown(value: Any) -> str:
    """Return a value as a message shows it."""
    try:
        text = "null" if value is None else " ".join(repr(value).split())
    except (ValueError, RecursionError):  # a number of thousands of digits, or a list in a list in a list ...
        return f"a {type(value).__name__} that is too long to show"
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def _is(kind: Any, value: Any, limits: Mapping[str, Any]) -> bool:
    if kind in (types.NoneType, None):
        return value is None
    if kind is Any:
        return True
    if get_origin(kind) in (list, tuple):
        inner = get_args(kind)[0]
        return isinstance(value, list | tuple) and all(_is(inner, item, limits) for item in value)
    if is_dataclass(kind):
        return isinstance(value, Mapping)
    kind = get_origin(kind) or kind
    if kind not in (int, float):
        return isinstance(value, kind)
    if isinstance(value, bool) or not isinstance(value, Integral if kind is int else Real):
        return False
    number: Any = value
    if not math.isfinite(value) if isinstance(value, float) else abs(number) > 2**63:
        return False
    low, high = limits.get("low", -math.inf), limits.get("high", math.inf)
    return (low < value if limits.get("above") else low <= value) and value <= high


def _wanted(kind: Any, limits: Mapping[str, Any]) -> str:
    if kind in (types.NoneType, None):
        return "null"
    if get_origin(kind) in (list, tuple):
        return f"a list, each entry {_wanted(get_args(kind)[0], limits)}"
    kind = get_origin(kind) or kind
    if kind not in (int, float):
        return WORDS.get(kind, "a mapping" if is_dataclass(kind) else f"a {getattr(kind, '__name__', kind)}")
    number = "a whole number" if kind is int else "a number"
    low, high = limits.get("low"), limits.get("high")
    if limits.get("above"):
        return f"{number} above {low:g} and at most {high:g}"
    return number if low is None else f"{number} from {low:.12g} to {high:.12g}"


def named_arguments(call: Callable[Given, Found]) -> Callable[Given, Found]:
    """Return the function with errors that name the nearest argument, or show the call if one is missing."""
    signature, called = _by_name(inspect.signature(call)), getattr(call, "__name__", "")
    first = [name for name, one in signature.parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD]

    @functools.wraps(call)
    def checked(*given: Given.args, **named: Given.kwargs) -> Found:
        try:
            signature.bind(*given, **named)
        except TypeError as error:
            unknown = next((name for name in named if name not in signature.parameters), None)
            if unknown is not None:
                raise TypeError(f"{called} has no argument {unknown}; there is {nearest(unknown, signature)}") from None
            raise TypeError(f"{called}({', '.join(first)}, ...): {error}") from None
        return call(*given, **named)

    vars(checked)["__signature__"] = signature
    return checked


def _by_name(signature: inspect.Signature) -> inspect.Signature:
    """Return the signature with each name of `**words: Unpack[SomeTypedDict]` as an argument of its own."""
    found = list(signature.parameters.values())
    if not found or get_origin(found[-1].annotation) is not typing.Unpack:
        return signature
    (words,) = get_args(found.pop().annotation)
    found += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in words.__annotations__.items()
    ]
    return signature.replace(parameters=found)


def nearest(name: str, known: Any) -> str:
    """Return the known names that are nearest to a wrong one, or all known names."""
    names = [n for n in (known.parameters if isinstance(known, inspect.Signature) else known) if n != "others"]
    meant = MEANT.get(name)
    return meant if meant is not None and meant in names else ", ".join(difflib.get_close_matches(name, names) or names)
