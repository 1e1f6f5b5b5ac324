"""Commands whose settings are Hydra's: how they start, and a short `--help`."""

import os
import re
import sys
import textwrap
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from specdec import registry
from specdec.cli.checks import check_places
from specdec.cli.commands import Command, description, loading
from specdec.cli.errors import one_sentence_errors
from specdec.cli.flags import FLAGS
from specdec.cli.hydra_settings import check_folders, check_settings, settings_errors
from specdec.cli.hydra_words import hydra_words, own_parts
from specdec.cli.parser import help_width, reflow
from specdec.registry import CONF


def start(name: str, command: Command, given: Sequence[str]) -> None:
    """Run a command with the settings of conf/ and the command line, checked before its module loads torch."""
    if {"-h", "--help"} & set(given[: given.index("--")] if "--" in given else given):
        print(help_text(name, command))
        return
    if command.prepared:
        given = import_module(f"specdec.{command.module}").prepare(given)
    words = hydra_words(command.conf, command.words, command.old, given)
    if any(word.startswith("from=") for word in words):
        from specdec.training.build import from_checkpoint

        words = from_checkpoint(words)
    words = own_parts(words)
    check_folders(words)
    import hydra

    @one_sentence_errors  # Hydra would print a line of its own about an exception
    def run(settings):
        from omegaconf import OmegaConf

        try:
            plain: Any = OmegaConf.to_container(settings, resolve=True)
        except RecursionError:
            raise ValueError("the settings refer to each other in a circle") from None
        check_places(plain)  # first, as it needs no torch
        check_settings(plain, command.conf)
        if "target" in plain:
            target = plain.get("shape") or plain["target"] or {}  # a shape has a name, and random weights
            loading(name, target.get("name") or target.get("path"), plain.get("draft"))
        import_module(f"specdec.{command.module}").run(settings)

    os.environ["HYDRA_FULL_ERROR"] = "1"  # let errors through to us instead of printing half a traceback
    sys.argv = [f"specdec {name}", *words]
    with settings_errors(command.conf):
        hydra.main(config_path=str(CONF), config_name=command.conf, version_base="1.3")(run)()


def help_text(name: str, command: Command) -> str:
    """What a command does, its groups with their names, and its own settings; Hydra's help prints a hundred more."""
    groups, own = _sections((CONF / f"{command.conf}.yaml").read_text(encoding="utf-8"))
    lines = [f"usage: specdec {name} [NAME=VALUE | --NAME VALUE ...]", "", reflow(description(command), help_width())]
    lines += ["", "groups: GROUP=NAME takes conf/GROUP/NAME.yaml, GROUP.FIELD=VALUE changes one of its settings"]
    for group, chosen in groups:
        others = [known for known in registry.names(group) if known != chosen]
        lines += _wrapped(f"{group}={chosen:{18 - len(group)}}" + (f"  or {', '.join(others)}" if others else ""), 21)
    lines += ["", "settings: a list is written 1,4"]
    for word, path in command.words.items():
        lines += _wrapped(f"{word + ':':22} # {path}: {FLAGS[word].help}", 23)
    for line in own:
        lines += _wrapped(line, max(line.find("#"), 0))
    return "\n".join([*lines, "", "--cfg job prints all settings, those of the groups too, as they would be used."])


def _wrapped(line: str, indent: int) -> list[str]:
    """A line of the help, broken where the terminal ends and going on at column `indent`."""
    return textwrap.wrap(line, help_width(), initial_indent="  ", subsequent_indent=" " * (indent + 2))


def _sections(text: str) -> tuple[list[tuple[str, str]], list[str]]:
    """A command's YAML -> its groups with the names chosen, and the lines of its own settings with comments."""
    blocks = re.split(r"^(?=\w+:)", text, flags=re.MULTILINE)  # text above the first one is a comment
    groups = [
        pair for block in blocks if block.startswith("defaults:") for pair in re.findall(r"- (\w+): (\w+)", block)
    ]
    own = "".join(block for block in blocks[1:] if not block.startswith(("defaults:", "hydra:")))
    lines = [line for line in own.splitlines() if line.lstrip().startswith("#") or line[:1].strip()]
    return groups, [re.sub(r"^(\w+:) {0,6}(?= *(#|$))", r"\1 {...}", line) for line in lines]
