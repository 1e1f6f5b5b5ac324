"""What Hydra's settings may be: conf/ itself is the schema. A default says the type, `Limits` says the range."""

import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import Field
from pathlib import Path
from typing import Any

from specdec import registry
from specdec.cli.limits import LIMITS
from specdec.cli.reading import check_yaml, read_text
from specdec.schema import check_value, kinds_of, parameters, shown, typed

QUOTES = "quote a value with spaces, brackets or commas, as in \"data.path='my file.jsonl'\""
AXES = ("topk", "steps", "num_draft_tokens")  # one number, or a list of them
WORDED = ("taps",)  # numbers that may be a word, which the drafter reads
PLACES = ("out", "target.path", "data.cache", "from_vllm")  # texts that Hydra reads as numbers if they look like one
NULLABLE = ("num_draft_tokens", "best_tree", "on_policy")  # null is a value, though the default is another
WORDS = {  # that a switch or a number may be
    "resume": ("auto",),
    "drafter.draft_vocab_size": ("auto",),
}
# Groups without a `_target_` that a class reads nevertheless: it knows more types and ranges than a file of values.
READ_BY = {
    "trainer": "specdec.training.loop.settings.TrainerConfig",
    "data.on_policy": "specdec.training.loop.settings.OnPolicy",
}
# Mappings with a fixed set of names. The class of a `_target_` defines its names, and the others are free.
FIXED = ("target", "trainer", "data", "data.on_policy", "benchmark", "suite", "best_tree")


def check_settings(settings: Mapping[str, Any], config: str) -> None:
    """Raise ValueError for a setting of `specdec CONFIG` that is unknown, empty, of a wrong type or out of range."""
    own, groups = registry.of_command(config)
    defaults = own | {group: _group(group) for group in groups}
    _names("", settings, defaults)

    def built(entry: tuple[str, Any]) -> bool:  # by a class, which is imported to check it, and with it torch: last
        return isinstance(entry[1], Mapping) and "_target_" in entry[1]

    for name, value in sorted(settings.items(), key=built):
        if name in FIXED and not isinstance(value, Mapping | str | None):
            raise ValueError(f"{name} must be a mapping or the name of a file in conf/{name}, got {shown(value)}")
        _check_targets(name, value)
        _walk(name, value, defaults.get(name))


def _check_targets(path: str, value: Any, deep: bool = False) -> None:
    """Raise ValueError for an object that a configuration must not build: Hydra would run anything, and early.

    Only a group itself may name a class, and only one of ours or of the user's own files.
    """
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for name, part in inner:
        if str(name).startswith("_") and (name != "_target_" or deep):
            raise ValueError(f"{path}.{name} is not allowed: only a group names what is built, by its _target_")
        if name == "_target_":
            registry.check_buildable(part, f"{path}._target_")
        _check_targets(f"{path}.{name}", part, deep=True)


def nearest_to(message: str, config: str) -> str:
    """Return the names most similar to the one that Hydra quotes in its message, or all; empty if it quotes none."""
    quoted = re.search(r"Could not (?:override|find) '([^']+)'", message)
    if quoted is None:
        return ""
    group, slash, name = quoted[1].rpartition("/")
    known = registry.names(group) if slash else list(dict.fromkeys(_known_names(config)))
    if name in known and not slash:
        return f"Another choice of {name.partition('.')[0]} has this setting, and the chosen one has not"
    near = difflib.get_close_matches(name, known, 3)
    if not near and not slash:  # perhaps without the name of its group
        last = {known_name.rpartition(".")[2] for known_name in known}
        close = difflib.get_close_matches(name.rpartition(".")[2], last, 2)
        near = [known_name for known_name in known if known_name.rpartition(".")[2] in close][:4]
    near = near or (known if slash else [])
    return f"There is {', '.join(near)}" if near else f"specdec {config} --help lists all"


def _known_names(config: str) -> Iterator[str]:
    """Every setting of conf/CONFIG.yaml and of the files of its groups, with dots."""

    def walk(prefix: str, value: Any) -> Iterator[str]:
        for name, inner in value.items() if isinstance(value, Mapping) else ():
            if name not in ("defaults", "hydra", "_target_"):
                yield f"{prefix}{name}"
                yield from walk(f"{prefix}{name}.", inner)

    own, groups = registry.of_command(config)
    yield from walk("", own)
    for group in groups:
        yield group
        for name in registry.names(group):
            yield from walk(f"{group}.", registry.settings(group, name))


def check_folders(arguments: Sequence[str]) -> None:
    """Raise ValueError for a settings file in a folder of --config-dir or --config-path that Hydra could not hold."""
    for at, word in enumerate(arguments):
        flag, _, folder = word.partition("=")
        if flag in ("--config-dir", "-cd", "--config-path", "-cp"):
            folder = folder or "".join(arguments[at + 1 : at + 2])
            if not folder.strip():
                raise ValueError(f"{flag} is empty: is a variable of the shell not set?")
            for file in Path(folder).rglob("*.yaml"):
                check_yaml(read_text(file, "settings"), str(file))


def _group(group: str) -> dict[str, Any]:
    """Return the settings of all files of a group with a value each, None where any has null; {} if of a class."""
    found: dict[str, Any] = {}
    for name in registry.names(group):
        content = registry.settings(group, name)
        if "_target_" in content:
            return {}
        content.pop("defaults", None)
        found |= {key: value for key, value in content.items() if key not in found or value is None}
    return found


def _walk(path: str, value: Any, default: Any) -> None:
    """Check a value and what is in it against the default of its place, which may be unknown: None."""
    name = path.rpartition(".")[2]
    if path in PLACES and not isinstance(value, str | None):
        raise ValueError(f"{path} must be a text, got {shown(value)}: give a folder that is named by a number as ./5")
    number = isinstance(default, int | float)
    if (number and isinstance(value, Mapping)) or (number and isinstance(value, list) and path not in AXES):
        _check_type(path, value, default)
    nullable = name in LIMITS and name != "taps" and type(None) in kinds_of(LIMITS[name].type)  # null by default
    if nullable and isinstance(value, Mapping | list) and path not in AXES:
        check_value(LIMITS[name], value, path)
    if isinstance(value, Mapping):
        known = default if isinstance(default, Mapping) else {}
        if path in FIXED and known:
            _names(f"{path}.", value, known)
        taken = _taken(path, value)
        for key, inner in value.items():
            default = known.get(key)  # its type does not count if a class defines it
            _walk(f"{path}.{key}", inner, None if key in taken and not isinstance(default, Mapping) else default)
            if key in taken:
                check_value(taken[key], inner, f"{path}.{key}")
        return
    if isinstance(value, list):
        if not value and name == "taps":
            raise ValueError(f"{path} is empty: a drafter without hidden states of the target learns nothing")
        for inner in value:
            _walk(path, inner, default if isinstance(default, int | float | str) else None)
        return
    if isinstance(value, str) and not value.strip():
        raise ValueError(f"{path} is empty: is a variable of the shell not set? Give a value, or null")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{path} must be a finite number, got {value}")
    if value is not None or name not in NULLABLE:
        _check_type(path, value, default)
    if path.startswith("trainer."):  # its steps are of another kind, and `TrainerConfig` has their range
        return
    worded = isinstance(value, str) and (name in WORDED or value in WORDS.get(path, ()) or "${" in value)
    if isinstance(value, int | float | str) and name in LIMITS and not worded:
        check_value(LIMITS[name], value, path)


def _taken(path: str, value: Mapping[str, Any]) -> dict[str, Field]:
    """Return what the class or function takes that reads a mapping; {} for none. ValueError for another name."""
    try:
        taken, others = parameters(registry.named(path, value.get("_target_") or READ_BY[path]))
    except (KeyError, ImportError, AttributeError, TypeError, ValueError):
        return {}  # no such class; or there is none of this name, which Hydra reports
    if not others:
        files = [registry.settings(path, name) for name in registry.names(path)] if "." not in path else []
        _names(f"{path}.", value, dict.fromkeys([*taken, *(name for file in files for name in file)]))
    return taken


def _check_type(path: str, value: Any, default: Any) -> None:
    """An unknown default, None, has no type; nor does a text, which may be replaced by numbers and mappings."""
    if isinstance(default, bool):
        words = WORDS.get(path, ())
        if not isinstance(value, bool) and value not in words:
            raise ValueError(f"{path} must be {' or '.join(('true', 'false', *words))}, got {shown(value)}")
    elif isinstance(default, int | float):
        check_value(typed(type(default)), value, path)
        if isinstance(default, int) and value < 0:
            raise ValueError(f"{path} must be at least 0, got {value}")


def _names(prefix: str, given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    for name in given:
        if name not in known and not name.startswith("_"):
            near = difflib.get_close_matches(name, known, 3) or sorted(known)
            raise ValueError(f"there is no setting {prefix}{name}; there is {', '.join(prefix + n for n in near)}")


@contextmanager
def settings_errors(config: str = "train") -> Iterator[None]:
    """Turn errors of Hydra into a ValueError: the first line of the message, and the most similar names."""
    from hydra.errors import HydraException, OverrideParseException
    from omegaconf.errors import OmegaConfBaseException

    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        said = str(error).strip().split("\n")[0]
        if isinstance(error, OverrideParseException):
            said = f"cannot read {error.override!r}: settings are written NAME=VALUE; {QUOTES}"
        inner = re.match(r"Key '([^']+)' is not in struct", str(error.__cause__))
        if inner and not re.search(rf"['.]{re.escape(inner[1])}['.]", said):  # in a mapping that was given
            raise ValueError(f"{said.rstrip('.')}: it holds no {inner[1]!r}") from None
        near = nearest_to(said, config)
        raise ValueError(f"{said.rstrip('.')}. {near}" if near else said) from None
