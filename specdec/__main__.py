"""The command `specdec`, also `python -m specdec`: one entry to all commands of `specdec.cli.commands`.

Flags are read and checked before the module of the command is imported, and with it torch.
"""

import difflib
import os
import sys
from importlib import import_module
from types import ModuleType

import specdec
from specdec import __version__
from specdec.cli.commands import COMMANDS, GROUPS, OLD, Command, loading, parse
from specdec.cli.errors import one_sentence_errors
from specdec.threads import SERVER_SPIN, limit_spinning

LONGEST = max(name.count(" ") for name in COMMANDS) + 1  # words of a command's name
CHAT = {"chat": "generate --chat"}  # what is no command, and where it is


def first(name: str) -> str:
    """Return the first word of a command's name, which is its group if it has one."""
    return name.partition(" ")[0]


def overview(group: str = "") -> str:
    """Return the help: of a group of commands, or of all."""
    prefix = f"{group} " if group else ""
    names = [name for name in COMMANDS if name.startswith(prefix)] if group else dict.fromkeys(map(first, COMMANDS))
    does = {name: GROUPS.get(name) or COMMANDS[name].does for name in names}
    width = max(map(len, does))
    lines = [
        f"usage: specdec {prefix}COMMAND [options]",
        "",
        "Speculative decoding: train a drafter, decode with it, prove it lossless, measure it.",
        "",
        *(f"  {name:{width}}  {words}" for name, words in does.items()),
        "",
        "specdec COMMAND --help lists the options of one; specdec --version [--verbose] prints the version.",
    ]
    return "\n".join(lines if group else [*lines, 'Try:  specdec generate --prompt "What is a tree?" --compare'])


def split(words: list[str]) -> tuple[str, list[str]]:
    """Return the command that a command line names, perhaps by an old name, and the words after it."""
    for count in range(LONGEST, 0, -1):
        if (name := " ".join(words[:count])) in COMMANDS:
            return name, words[count:]
    if words[0] in OLD:
        return split([*OLD[words[0]].split(), *words[1:]])
    return _group(words)


def _group(words: list[str]) -> tuple[str, list[str]]:
    """Do the same as `split` for a line that names a group of commands, or nothing known."""
    name, rest = words[0], words[1:]
    if name in GROUPS and (not rest or rest[0] in ("-h", "--help")):
        return name, rest
    if name in GROUPS:
        known = [other.removeprefix(f"{name} ") for other in COMMANDS if other.startswith(f"{name} ")]
        raise ValueError(f"there is no command {' '.join(words[:2])!r}; specdec {name} has {', '.join(known)}")
    near = difflib.get_close_matches(name, [*COMMANDS, *GROUPS], 1)
    near = [CHAT[name]] if name in CHAT else near
    meant = f"did you mean {near[0]}? " if near else ""
    raise ValueError(f"there is no command {name!r}; {meant}specdec --help lists all")


def installation() -> str:
    """Return what a bug report needs, a line each: versions, system, processor and GPU."""
    import platform

    import torch

    from specdec.engine.recorder import versions
    from specdec.machine import machine

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = {"specdec": __version__} | versions() | {"system": platform.platform()} | machine(device)
    return "\n".join(f"{name}: {value}" for name, value in found.items())


def make_callable(module: str) -> None:
    """Let specdec.NAME be called as the function `specdec.NAME`, whose place the import of the module takes."""

    class Callable(ModuleType):
        def __call__(self, *args, **kwargs):
            return specdec.__getattr__(module.rpartition(".")[2])(*args, **kwargs)

    sys.modules[module].__class__ = Callable


@one_sentence_errors
def main(argv: list[str] | None = None) -> None:
    """Run the command that `argv` (default: `sys.argv[1:]`) names, or print help or the version."""
    words = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ValueError("the current folder has been removed: change to another one") from None
    if words[0] in ("-h", "--help", "help"):
        print(overview())
        return
    if words[0] == "--version":
        print(__version__ if words[1:] != ["--verbose"] else installation())
        return
    name, rest = split(words)
    try:
        if name in GROUPS:
            print(overview(name))
        else:
            run(name, COMMANDS[name], rest)
    finally:  # after the output, of which a script may read the first line
        if words[0] != name.split()[0]:
            print(f"note: specdec {words[0]} is now specdec {OLD[words[0]]}", file=sys.stderr)


def run(name: str, command: Command, words: list[str]) -> None:
    """Read the words after the name of a command, and run it."""
    if command.conf:
        from specdec.cli.hydra_entry import start  # which loads Hydra

        start(name, command, words)
        return
    args = parse(name, words)
    if "dtype" in args:  # the command reads weights
        loading(name, args.target, getattr(args, "draft", None))
    if name == "serve":
        limit_spinning(SERVER_SPIN)
    import_module(f"specdec.{command.module}").run(args)


if __name__ == "__main__":
    main()
