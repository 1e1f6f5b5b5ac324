"""The code blocks of documentation pages, and checks of blocks that no test executes.

An indented block, or one fenced as `sh`, holds commands. Other fenced blocks have the language after the fence, and
those without one hold output or a diagram.
"""

import ast
import importlib.util
import inspect
import json
import pkgutil
import re
import shlex
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from hydra import compose, initialize_config_dir

import specdec
from specdec import registry
from specdec.__main__ import split
from specdec.cli import checks
from specdec.cli.commands import COMMANDS, OLD, parser_of, with_slots
from specdec.cli.hydra_words import hydra_words
from specdec.serve.protocol import ChatAsk, read

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
# Programs that are not of this project: of their lines only the quotes are read.
OTHERS = {"git", "cd", "printf", "tar", "ls", ".", "vllm", "guidellm"}
OTHER_MODULES = {"build", "venv", "vllm.entrypoints.openai.api_server"}
FENCED_OR_INDENTED = re.compile(r"^```(\w*) ?(.*)\n([\s\S]*?)^```$|((?:(?<=\n\n)|^)(?:(?: {4}.*)?\n)+)", re.MULTILINE)
PIPES = re.compile(r"&&|\|\||[|;]")


class Block(NamedTuple):
    kind: str  # "sh", "python", ..., or "" for output
    where: str  # what follows the language, such as file=toy.py
    text: str


def blocks(page: Path) -> Iterator[Block]:
    """Yield the code blocks of a page in order."""
    text = page.read_text(encoding="utf-8")
    for found in FENCED_OR_INDENTED.finditer(text):
        kind, where, fenced, indented = found.groups()
        if fenced is not None:
            yield Block(kind, where, fenced)
        elif indented.strip():
            yield Block("sh", "", re.sub("^    ", "", indented, flags=re.MULTILINE))


def lines_of(block: str) -> Iterator[list[str]]:
    """Yield the words of each command: joined where a line ends in a backslash or in an open quote, without comments,
    separated at && and pipes, without VAR=VALUE in front and redirections at the end."""
    line = ""
    for part in block.replace("\\\n", " ").splitlines():
        line = f"{line}\n{part}" if line else part
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # no closing quotation yet
            continue
        line = ""
        while words:
            end = next((at for at, word in enumerate(words) if PIPES.fullmatch(word)), len(words))
            one, words = words[:end], words[end + 1 :]
            while one and re.match(r"\w+=", one[0]):
                one = one[1:]
            if one and one[0] != "export":
                yield one[: one.index(">")] if ">" in one else one
    assert not line, f"a quote stays open: {line}"


def check_command(words: list[str]) -> None:
    """Raise an error if the program, its command, a flag, a setting, or a file of this repository does not exist."""
    program, rest = words[0].removeprefix(".venv/bin/"), words[1:]
    if program == "specdec":
        understand(rest)
    elif program in ("torchrun", "accelerate"):
        check_module(rest[rest.index("-m") + 1 :])
    elif program in ("python", "python3") and rest[0] == "-m":
        check_module(rest[1:])
    elif program in ("python", "python3"):
        check_flags(ROOT / rest[0], rest[1:])
    elif program == "make":
        assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), f"no target {rest[0]}"
    elif program == "pip":
        check_packages(rest)
    elif program == "curl":
        read(ChatAsk, json.loads(rest[rest.index("-d") + 1]))
    else:
        assert program in OTHERS, f"unknown program {program}"


def check_module(words: list[str]) -> None:
    """Check the words after `-m`."""
    name, rest = words[0], words[1:]
    if name in ("specdec", "specdec.generate", "specdec.train"):
        understand([*name.split(".")[1:], *rest])
    elif name == "pytest":
        for word in rest:
            assert "/" not in word or (ROOT / word).exists(), word
    elif name not in OTHER_MODULES:
        spec = importlib.util.find_spec(name)
        assert spec is not None, f"no module {name}"
        check_flags(Path(str(spec.origin)), rest)


def check_flags(file: Path, words: list[str]) -> None:
    """Check that the source of a script names each flag."""
    source = file.read_text(encoding="utf-8")
    for word in words:
        assert not word.startswith("--") or f'"{word.partition("=")[0]}"' in source, f"{file.name} has no {word}"


def check_packages(words: list[str]) -> None:
    """Check the extras and files of a line of pip."""
    for before, word in pairwise(words):
        if before in ("--constraint", "--requirement"):
            assert (ROOT / word).is_file(), word
        extras = re.fullmatch(r"(?:\.|specdec)\[([\w,]+)\]", word)
        for extra in extras[1].split(",") if extras else ():
            assert extra in PYPROJECT["project"]["optional-dependencies"], f"no extra {extra}"


def understand(words: list[str]) -> None:
    """Check a command of specdec by its real parser, or compose its settings. For lists of `--multirun` the first value
    of each is taken. `specdec lab jobs` has a command of its own after `--`."""
    assert words[0] not in OLD, f"specdec {words[0]} is an old name"
    name, rest = split(words)
    if name == "lab jobs":
        cut = rest.index("--")
        understand([word.format(part=0, parts=1) for word in rest[cut + 1 :]])
        rest = rest[:cut]
    if "--multirun" in rest:
        rest = [re.sub(r"^([\w.]+=[^,\[]+),.*", r"\1", word) for word in rest if word != "--multirun"]
    rest = [word for word in rest if not word.startswith("hydra")]  # of launchers
    if "--cfg" in rest or rest == ["--help"]:
        return
    command = COMMANDS[name]
    if command.conf and not any("toy.py" in word for word in rest):
        with initialize_config_dir(str(registry.CONF), version_base="1.3"):
            compose(command.conf, hydra_words(command.conf, command.words, {}, rest))
    elif not command.conf:
        checks._check_together(name, parser_of(name).parse_args(with_slots(command, rest)))


def check_calls(code: str) -> None:
    """Check Python that is not executed: that it compiles, and that names of specdec exist and take the arguments."""
    tree = ast.parse(code)
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}:{alias.name}" for alias in node.names}
    for target in names.values():
        pkgutil.resolve_name(target)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        first, _, others = ast.unparse(node.func).partition(".")
        if names.get(first, "").startswith("specdec"):
            called = pkgutil.resolve_name(names[first])
            for name in others.split(".") if others else ():  # specdec.generate is a module too
                called = specdec.__getattr__(name) if called is specdec else getattr(called, name)
            inspect.signature(called).bind(*node.args, **{word.arg: word.value for word in node.keywords if word.arg})
