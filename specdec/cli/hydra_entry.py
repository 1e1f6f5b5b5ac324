"""Commands whose settings are Hydra's: their `main`, and a short `--help`."""

import functools
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from specdec import registry
from specdec.cli.errors import one_sentence_errors
from specdec.cli.flags import help_width, reflow
from specdec.cli.hydra_parts import own_parts
from specdec.cli.hydra_settings import check_folders, check_settings, check_words, nearest_to
from specdec.registry import CONF

QUOTES = "quote a value with spaces, brackets or commas, as in \"data.path='my file.jsonl'\""


def hydra_command(
    run: Callable, config: str, program: str | None = None, rewrite: Callable[[list[str]], list[str]] = list
) -> Callable[[], None]:
    """The `main` of a command: `run`, with the settings that conf/CONFIG.yaml and the command line make.

    program: how it is called, if not as `specdec CONFIG`. `--help` prints the docstring of the module of `run`.
    rewrite: makes of the words those that Hydra reads."""

    @one_sentence_errors
    def main() -> None:
        if {"-h", "--help"} & set(sys.argv[1:]):
            print(help_text(program or f"specdec {config}", config, sys.modules[run.__module__].__doc__))
            return
        import hydra

        sys.argv[1:] = own_parts(rewrite(sys.argv[1:]))
        check_words(sys.argv[1:])
        check_folders(sys.argv[1:])
        os.environ["HYDRA_FULL_ERROR"] = "1"  # let errors through to us instead of printing half a traceback
        with settings_errors(config):
            hydra.main(config_path=str(CONF), config_name=config, version_base="1.3")(checked(run, config))()

    return main


def checked(run: Callable, config: str) -> Callable:
    """`run`, with settings that `check_settings` has seen.

    A wrong one ends the process, as Hydra would print a line of its own about an exception."""

    @functools.wraps(run)
    @one_sentence_errors
    def wrapped(settings):
        from omegaconf import OmegaConf

        try:
            plain = OmegaConf.to_container(settings, resolve=True)
        except RecursionError:
            raise ValueError("the settings refer to each other in a circle") from None
        check_settings(plain, config)
        return run(settings)

    return wrapped


def help_text(program: str, config: str, description: str) -> str:
    """What a command does, its groups of settings with their names, and its own settings as conf/CONFIG.yaml has them.

    Hydra's own help prints every setting of every group, a hundred lines and more; `--cfg job` does so too."""
    groups, own = _sections((CONF / f"{config}.yaml").read_text(encoding="utf-8"))
    lines = [f"usage: {program} [SETTING=VALUE ...]", "", reflow(description, help_width()), ""]
    lines.append("groups: GROUP=NAME takes conf/GROUP/NAME.yaml, GROUP.FIELD=VALUE changes one of its settings")
    for group, name in groups:
        others = [known for known in registry.names(group) if known != name]
        lines += _wrapped(f"{group}={name:{18 - len(group)}}" + (f"  or {', '.join(others)}" if others else ""), 21)
    lines += ["", "settings:"]
    for line in own:
        lines += _wrapped(line, max(line.find("#"), 0))
    return "\n".join([*lines, "", "--cfg job prints all settings, those of the groups too, as they would be used."])


def _wrapped(line: str, indent: int) -> list[str]:
    """A line of the help, broken where the terminal ends and going on at column `indent`."""
    return textwrap.wrap(line, help_width(), initial_indent="  ", subsequent_indent=" " * (indent + 2))


def _sections(text: str) -> tuple[list[tuple[str, str]], list[str]]:
    """A command's YAML -> its groups with the names chosen, and the lines of its own settings with their comments.

    Of a setting that is a mapping only the name is listed."""
    blocks = re.split(r"^(?=\w+:)", text, flags=re.MULTILINE)  # text above the first one is a comment
    groups = [
        pair for block in blocks if block.startswith("defaults:") for pair in re.findall(r"- (\w+): (\w+)", block)
    ]
    own = "".join(block for block in blocks[1:] if not block.startswith(("defaults:", "hydra:")))
    lines = [line for line in own.splitlines() if line.lstrip().startswith("#") or line[:1].strip()]
    return groups, [re.sub(r"^(\w+:) {0,6}(?= *(#|$))", r"\1 {...}", line) for line in lines]


@contextmanager
def settings_errors(config: str = "train") -> Iterator[None]:
    """What Hydra finds wrong with settings is a user's mistake: a ValueError, and of its text the first line, with the
    nearest names that there are in conf/CONFIG.yaml."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        said = str(error).strip().split("\n")[0]
        if said.startswith("Error parsing override"):
            said += f": settings are written NAME=VALUE; {QUOTES}"
        inner = re.match(r"Key '([^']+)' is not in struct", str(error.__cause__))
        if inner and f"'{inner[1]}'" not in said and f".{inner[1]}'" not in said:  # in a mapping that was given
            raise ValueError(f"{said.rstrip('.')}: it holds no {inner[1]!r}") from None
        near = nearest_to(said, config)
        raise ValueError(f"{said.rstrip('.')}. {near}" if near else said) from None
