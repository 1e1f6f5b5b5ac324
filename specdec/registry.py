"""What conf/ registers: a file conf/GROUP/NAME.yaml is the only place where a name is tied to a class."""

import io
import os
from copy import deepcopy
from functools import cache
from importlib import import_module
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from specdec.cli.reading import check_yaml, read_text

CONF = Path(__file__).parent / "conf"


def names(group: str) -> list[str]:
    """The names of a group, such as 'tree' or 'verifier', in alphabetical order."""
    return sorted(file.stem for file in (CONF / group).glob("*.yaml"))


def settings(group: str, name: str) -> dict:
    """What conf/GROUP/NAME.yaml holds. Raises ValueError, with the names that there are, for any other name."""
    known = names(group)
    if name not in known:
        raise ValueError(f"there is no {group} {name!r}: choose one of {', '.join(known)}")
    return deepcopy(_read_once(CONF / group / f"{name}.yaml"))


@cache
def _read_once(file: Path) -> dict:
    """The file is read several times at every start."""
    return read_yaml(file, "settings")


def target(group: str, name: str) -> type:
    """The class or function that conf/GROUP/NAME.yaml names as its `_target_`."""
    module, _, attribute = settings(group, name)["_target_"].rpartition(".")
    return getattr(import_module(module), attribute)


def make(group: str, name: str, **changes):
    """What conf/GROUP/NAME.yaml describes; `changes` take the place of its own settings.

    Raises ValueError for an unknown name, and whatever the class raises for settings that it does not take."""
    own = settings(group, name)
    own.pop("_target_")
    return target(group, name)(**own | changes)


def read_yaml(path: str | os.PathLike, what: str):
    """The content of a YAML or JSON file in plain Python values: dicts, lists, texts, numbers.

    what: names the kind of file in errors. Raises ValueError, one sentence, if the file is not there or is no YAML."""
    file = Path(path)
    text = read_text(file, what)
    check_yaml(text, str(path))
    try:
        content = OmegaConf.load(io.StringIO(text))
    except (YAMLError, OmegaConfBaseException, OSError, ValueError) as error:
        raise ValueError(f"{path} is not a YAML file: {str(error).splitlines()[0]}") from None
    return OmegaConf.to_container(content)
