"""What conf/ registers: a file conf/GROUP/NAME.yaml is the only place where a name is tied to a class."""

import io
import os
import pkgutil
import sysconfig
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from specdec import own
from specdec.cli.reading import check_yaml, read_text
from specdec.schema import shown

CONF = Path(__file__).parent / "conf"
GROUPS = sorted(folder.name for folder in CONF.iterdir() if folder.is_dir())


def names(group: str) -> list[str]:
    """Return the names of a group, such as 'tree' or 'verifier', in alphabetical order."""
    return sorted(file.stem for file in (CONF / group).glob("*.yaml"))


def settings(group: str, name: str) -> dict:
    """Return the content of conf/GROUP/NAME.yaml. Raises ValueError, with the known names, for any other name."""
    known = names(group)
    if name not in known:
        yours = ", or name your own as FILE.py:NAME" if group in own.POINTS else ""
        raise ValueError(f"there is no {group} {name!r}: choose one of {', '.join(known)}{yours}")
    return deepcopy(_read_once(CONF / group / f"{name}.yaml"))


@cache
def _read_once(file: Path) -> dict:
    """Read a file, which is needed several times at every start, once."""
    return read_yaml(file, "settings")


def of_command(config: str) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of conf/CONFIG.yaml without those of its groups, and the names of these groups."""
    own = read_yaml(CONF / f"{config}.yaml", "settings")
    own.pop("hydra", None)
    groups = [name for entry in own.pop("defaults", ()) if isinstance(entry, dict) for name in entry]
    return own, [group for group in groups if "/" not in group and " " not in group]


def check_buildable(name: object, where: str) -> None:
    """Raise ValueError unless `name` is of specdec, of the user's own file or an entry point for parts of specdec."""
    if own.is_own(name):
        return
    top = name.partition(".")[0] if isinstance(name, str) else ""
    if top in ("drafters", "trees", "training"):  # as version 0.1 named them
        return
    if isinstance(name, str) and top == "specdec":
        if name.rpartition(".")[2][:1] == "_" or not _ours(name):
            raise ValueError(f"{where} must name a class or function of specdec, got {shown(name)}")
        return
    if name in own.points():
        return
    found = find_spec(top) if top.isidentifier() else None
    places = [place for place in (found.origin, *(found.submodule_search_locations or ())) if place] if found else []
    folders = [Path(sysconfig.get_path(part)).resolve() for part in ("stdlib", "platstdlib", "purelib", "platlib")]
    installed = any(Path(place).resolve().is_relative_to(folder) for place in places for folder in folders)
    if not places or installed or {"built-in", "frozen"} & set(places):
        raise ValueError(f"{where} must name a class or function of specdec or of your own file, got {shown(name)}")


def _ours(name: str) -> bool:
    """Return whether a dotted name is defined in specdec, or does not exist, which Hydra reports."""
    try:
        return str(getattr(pkgutil.resolve_name(name), "__module__", "")).startswith("specdec")
    except (ImportError, AttributeError, ValueError):
        return True


def named(group: str, dotted: str) -> Callable:
    """Return the class or function of a dotted name, or the user's own of FILE.py:NAME."""
    mine = group in own.POINTS and (own.is_own(dotted) or "." not in dotted)
    part = own.find(group, dotted) if mine else None
    return pkgutil.resolve_name(dotted) if part is None else part


def target(group: str, name: str) -> Any:
    """Return the class or function that conf/GROUP/NAME.yaml names as its `_target_`."""
    return pkgutil.resolve_name(settings(group, name)["_target_"])


def make(group: str, name: str, **changes: Any) -> Any:
    """Make what conf/GROUP/NAME.yaml describes; `changes` replace the file's own settings."""
    own = settings(group, name)
    own.pop("_target_")
    return target(group, name)(**own | changes)


def read_yaml(path: str | os.PathLike, what: str) -> Any:
    """Return the content of a YAML or JSON file in plain Python values. Raises ValueError, which calls it `what`."""
    from omegaconf import OmegaConf  # half of the time of a command's help
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    text = read_text(Path(path), what)
    check_yaml(text, str(path))
    try:
        content = OmegaConf.load(io.StringIO(text))
    except (YAMLError, OmegaConfBaseException, OSError, ValueError) as error:
        raise ValueError(f"{path} is not a YAML file: {str(error).splitlines()[0]}") from None
    return OmegaConf.to_container(content)
