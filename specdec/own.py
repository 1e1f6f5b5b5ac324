"""Parts that the user wrote: FILE.py:NAME, or an entry point of an installed package.

A drafter, tree, verifier or objective can be named this way wherever a name of conf/ can. A checkpoint stores only the
name `my.py:create`. It is loaded with that code only if the user has passed the file to this process.
"""

import hashlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

Part = TypeVar("Part")

# The groups of conf/ that take such a part, and the entry points of each
POINTS = {
    "drafter": "specdec.drafters",
    "tree": "specdec.trees",
    "verifier": "specdec.verifiers",
    "objective": "specdec.objectives",
}
FORM = re.compile(r"(?P<file>[^\n]*?\.py)(?::(?P<name>\w*))?(?::(?P<checkpoint>.+))?")
MODULE = "specdec_own_"  # how the names of modules of users' files begin
PLAIN = (type(None), bool, int, float, str, list, tuple, dict)  # defaults that a settings file can hold
_passed: dict[str, tuple[str, Callable]] = {}  # what the user has named in this process, by its `short` name


def is_own(text: object) -> bool:
    """Return whether a text has the form FILE.py:NAME or FILE.py:NAME:CHECKPOINT."""
    return isinstance(text, str) and FORM.fullmatch(text) is not None


def split(text: str) -> tuple[str, str | None]:
    """Split FILE.py:NAME:CHECKPOINT into FILE.py:NAME and CHECKPOINT; None for a part that is missing."""
    found = FORM.fullmatch(text)
    return (text, None) if found is None else (f"{found['file']}:{found['name'] or ''}", found["checkpoint"])


def short(text: str) -> str:
    """Return the name that a checkpoint stores: `my.py:create` for ../folder/my.py:create; an entry point as it is."""
    found = FORM.fullmatch(text)
    return text if found is None else f"{Path(found['file']).name}:{found['name']}"


def passed(name: str) -> Callable | None:
    """Return the part of this `short` name if the user has named it in this process."""
    return _passed.get(name, ("", None))[1]


def as_passed(name: str) -> str:
    """Return a `short` name as the user has written it in this process."""
    return _passed.get(name, (name, None))[0]


def _entry_points(**of: str):
    from importlib.metadata import entry_points  # which takes a third of the time of a command's help

    return entry_points(**of)


def points() -> set[str]:
    """Return the names of all entry points for parts of specdec."""
    return {point.name for group in POINTS.values() for point in _entry_points(group=group)}


def find(group: str, text: str) -> Callable | None:
    """Return the class or function of a FILE.py:NAME or an entry point; None for another text. Raises ValueError."""
    if (found := FORM.fullmatch(text)) is None:
        point = next(iter(_entry_points(group=POINTS[group], name=text)), None)
        if point is None:
            return None
        with blamed(text, "importing it"):
            part = point.load()
    else:
        part = _of_file(found["file"], found["name"])
    if not callable(part):
        raise ValueError(f"{text} is a {type(part).__name__}: name a class or a function")
    code = split(text)[0]
    _passed[short(code)] = code, part
    return part


def _of_file(file: str, name: str | None) -> Any:
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"there is no file {file}{'' if Path(file).is_absolute() else f' from {Path.cwd()}'}")
    module = _module(path, path.stat().st_mtime_ns)
    there = [known for known, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    if name and hasattr(module, name):
        return getattr(module, name)
    known = get_close_matches(name or "", there) or there or ["no class and no function"]
    wrong = f"has no {name!r}" if name else "needs a name after a colon"
    raise ValueError(f"{file} {wrong}; there is {', '.join(known)}")


@cache
def _module(path: Path, changed: int) -> Any:
    """Import the module of a file. changed: when the file was written, so that an edited file is read again."""
    name = f"{MODULE}{hashlib.sha256(str(path).encode()).hexdigest()[:8]}_{path.stem}"
    spec: Any = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look themselves up there
    with blamed(str(path), "importing it"):
        spec.loader.exec_module(module)
    return module


class BlamedError(ValueError):
    """An error of the user's code, which is its cause."""


@contextmanager
def blamed(text: str, what: str) -> Iterator[None]:
    """Raise ValueError, one sentence, for whatever the user's code raises. what: what was being done with it."""
    try:
        yield
    except (Exception, SystemExit) as raised:
        error = raised.__cause__ if isinstance(raised, BlamedError) and raised.__cause__ else raised
        reason = " ".join(str(error).split()) or "no reason given"
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        where = f" ({place})" if (place := place_of(error)) else ""
        raise BlamedError(f"{text}: {what} failed: {kind}{reason:.300}{where}") from error


def place_of(error: BaseException) -> str:
    """Return where an error was raised in a user's file, such as `my.py line 3`; empty for no such file."""
    frames = list(traceback.walk_tb(error.__traceback__))
    mine = [(frame, line) for frame, line in frames if frame.f_globals.get("__name__", "").startswith(MODULE)]
    return f"{Path(mine[-1][0].f_code.co_filename).name} line {mine[-1][1]}" if mine else ""


def name_of(part: object) -> str:
    """Return the name of a user's own object by its class, such as `my.py:Rule`; empty for None and specdec's own."""
    module, name = type(part).__module__, type(part).__name__
    if part is None or module.startswith("specdec."):
        return ""
    return (
        f"{Path(sys.modules[module].__file__ or '').name}:{name}" if module.startswith(MODULE) else f"{module}.{name}"
    )


def make(text: str, part: Callable, base: type[Part], *given: Any, **settings: Any) -> Part:
    """Call a part, and return what it makes. Raises ValueError if it fails or makes something other than a `base`."""
    check_arguments(text, part, *given, **settings)
    with blamed(text, "making it"):
        made = part(*given, **settings)
    if not isinstance(made, base):
        kind, wanted = type(made).__name__, f"{base.__module__}.{base.__name__}"
        raise ValueError(f"{text} makes a {kind}: it must make a {wanted}, so derive its class from that")
    return made


def check_arguments(text: str, part: Callable, *given: Any, **settings: Any) -> None:
    """Raise ValueError unless a part can be called with these arguments."""
    try:
        inspect.signature(part).bind(*given, **settings)
    except TypeError as error:
        words = ", ".join(["target"] * len(given) + [f"{name}=..." for name in settings])
        call = f"{short(text).partition(':')[2] or text}({words})"
        raise ValueError(f"{text} cannot be called as {call}: {error}") from None


def settings_of(text: str, part: Callable, *skipped: str) -> dict[str, Any]:
    """The settings of a part with their defaults, which a file can hold: its arguments by name, but for `skipped`."""
    taken = [one for one in inspect.signature(part).parameters.values() if one.name not in skipped]
    named = [one for one in taken if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    for one in named:
        if not isinstance(one.default, PLAIN):
            raise ValueError(f"{text}: its argument {one.name} needs a default that is a number, a text or a list")
    return {one.name: one.default for one in named}


def digest(part: Any) -> str:
    """A hash of the file that FILE.py:NAME names, or that an object's class is of; empty for any other part."""
    module = type(part).__module__
    file = sys.modules[module].__file__ if module.startswith(MODULE) else ""
    if isinstance(part, str) and (found := FORM.fullmatch(part)):
        file = found["file"]
    return hashlib.sha256(Path(file).expanduser().read_bytes()).hexdigest() if file else ""
