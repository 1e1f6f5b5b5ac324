"""README.md and docs/ name files, links, modules and commands that there are, and their code blocks work.

Python blocks are executed, in order, in one namespace for each page. These are parsed only:

- Commands: models, data sets and servers of the examples do not exist here, and training takes minutes. Each line of
  specdec goes through the parser of its command, or its settings are composed. Scripts must name their flags; targets
  of make, extras of pip and paths must exist. Commands of first_drafter.md and add_a_drafter.md are run by tests of
  their own.
- Python with `file=`, which another test runs or which trains, and a client of a server: they compile, and each call
  of specdec must fit the signature.
- YAML, JSON and TOML: read as specdec reads them.
- Blocks without a language: output and diagrams. They may hold no command.

docs/log.md, a history, is left out.

An indented block, or one fenced as `sh`, holds commands. Other fenced blocks have the language after the fence.
"""

import argparse
import ast
import dataclasses
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

import pytest
from hydra import compose, initialize_config_dir

import specdec
from specdec import registry
from specdec.__main__ import split
from specdec.cli import checks
from specdec.cli.checks import with_settings
from specdec.cli.commands import COMMANDS, OLD, parser_of, with_slots
from specdec.cli.flags import FLAGS, dashed
from specdec.cli.hydra_words import hydra_words
from specdec.model.hf_devices import read_map
from specdec.own import POINTS
from specdec.serve.protocol import ChatAsk, read
from specdec.trees.spec import TreeSettings

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
# Programs that are not of this project: of their lines only the quotes are read.
OTHERS = {"git", "cd", "printf", "tar", "ls", ".", "vllm", "guidellm"}
OTHER_MODULES = {"build", "venv", "vllm.entrypoints.openai.api_server"}
FENCED_OR_INDENTED = re.compile(r"^```(\w*) ?(.*)\n([\s\S]*?)^```$|((?:(?<=\n\n)|^)(?:(?: {4}.*)?\n)+)", re.MULTILINE)
PIPES = re.compile(r"&&|\|\||[|;]")
FOLDERS = "specdec|drafters|trees|training|conf|scripts|tests|docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "specdec" / "demo" / "README.md",
    *sorted(page for page in (ROOT / "docs").glob("*.md") if page.name != "log.md"),
]
NAVIGATION = set(re.findall(r'"(\w+\.md)"', (ROOT / "zensical.toml").read_text(encoding="utf-8")))
OTHER_FLAGS = {  # of Hydra's commands, of scripts/gpu_proof.py, of an old command, and of other programs
    *("--cfg", "--from", "--with", "--minutes", "--stages", "--work", "--prompt-file"),
    *("--machine_rank", "--speculative-config", "--speculative-token-map"),
}
MADE_UP = ("NAME", "toy")  # docs/architecture.md's placeholder; the drafter that docs/add_a_drafter.md makes


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
        parser = parser_of(name)
        settings = vars(parser.parse_args(with_slots(command, rest)))
        checks._check_together(name, argparse.Namespace(**settings), parser)
        if name == "generate" and settings["tree"] != "tree.yaml":  # that one is made for the drafter
            check_depth(settings)


def check_depth(settings: dict) -> None:
    """Check that a bundled block drafter drafts as many levels as the tree has."""
    config = ROOT / "specdec" / str(settings["draft"]) / "config.json"
    tree = TreeSettings(**{field.name: settings[field.name] for field in dataclasses.fields(TreeSettings)})
    if config.is_file() and not tree.automatic:
        block = json.loads(config.read_text(encoding="utf-8")).get("block_size", tree.make().steps)
        assert tree.make().steps <= block, f"a tree of {tree.make().steps} levels for {settings['draft']}"


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
        if target.startswith("specdec"):  # others, as openai, need not be installed
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


def found(pattern: str, page: Path) -> set[str]:
    """What the pattern finds on a page, less what the page makes up."""
    names = {name.rstrip(".") for name in re.findall(pattern, page.read_text(encoding="utf-8"))}
    return {name for name in names if not any(word in name for word in MADE_UP)}


@pytest.fixture(params=PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def page(request) -> Path:
    return request.param


def test_files_are_there(page):
    for name in found(rf"(?<![\w/.$-])(?:{FOLDERS})/[\w./*-]*", page):
        assert list(ROOT.glob(name)), f"{page.name} names {name}"


def test_links_lead_somewhere(page):
    for link in found(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page):
        assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_modules_can_be_run(page):
    for name in found(r"-m (specdec[\w.]*)", page):
        assert importlib.util.find_spec(name), f"{page.name} runs {name}"


def test_names_can_be_imported(page):
    for name in found(r"(?<![\w/.-])specdec(?:\.[A-Za-z_]\w*)+", page):
        pkgutil.resolve_name(name)


def test_blocks(page, tmp_path, monkeypatch):
    """Blocks of Python run in order, in one namespace. Other blocks are checked by their kind."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": page.stem}
    for kind, where, text in blocks(page):
        if kind == "sh":
            for words in lines_of(text):
                check_command(words)
        elif kind == "python" and (where or "import openai" in text):
            check_calls(text)
        elif kind == "python":
            exec(compile(text, page.name, "exec"), names)
        elif kind == "yaml":
            Path("settings.yaml").write_text(text)
            with_settings(parser_of("generate"), ["--prompt", "x", "--settings", "settings.yaml"])
        elif kind == "json":
            Path("map.json").write_text(text)
            assert read_map("map.json")
        elif kind == "toml":
            assert set(tomllib.loads(text)["project"]["entry-points"]) <= set(POINTS.values())
        else:
            assert kind == "", f"a block of an unknown kind: {kind}"
            assert not re.search(r"^(specdec|python3?|pip|make|curl|printf|git|import|from) ", text, re.MULTILINE)


def test_a_wrong_block_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("Text.\n\n    specdec generate --prompt x --no-such-flag\n    make nothing\n\n```\n1 token\n```\n")
    assert [block.kind for block in blocks(page)] == ["sh", ""]
    commands = list(lines_of(next(blocks(page)).text))
    for words in (*commands, ["specdec", "doctor", "DRAFT"], ["python", "scripts/build_docs.py", "--fast"]):
        with pytest.raises((ValueError, AssertionError)):
            check_command(words)
    with pytest.raises(TypeError):
        check_calls("import specdec\nspecdec.generate('demo/target', 'x', drafts='ngram')")


def test_fields_of_the_client(page):
    """The fields that clients written in Python send are fields of a request."""
    for _, _, text in blocks(page):
        for call in re.findall(r"completions\.create\((.*)\)", text):
            assert set(re.findall(r"(\w+)=", call)) <= set(ChatAsk.model_fields)


def test_commands_in_the_text_exist(page):
    """Commands and flags that a sentence names exist. Such a command may lack flags that it needs."""
    text = re.sub(r"```[\s\S]*?```", "", page.read_text(encoding="utf-8"))
    for line in re.findall(r"`specdec ([a-z][^`\n]*)`", text):
        name, rest = split(line.split())
        if rest and COMMANDS[name].conf:
            understand(line.split())
        elif rest:
            known = {flag for action in parser_of(name)._actions for flag in action.option_strings}
            assert {word for word in rest if word.startswith("-")} <= known, line
    flags = {dashed(name) for command in COMMANDS.values() for name in (*FLAGS, *command.own)} | OTHER_FLAGS
    for flag in re.findall(r"`(--[a-z][\w-]*)", text):
        assert flag in flags, f"{page.name} names {flag}"


def test_every_command_is_listed():
    text = (ROOT / "docs" / "reference_commands.md").read_text(encoding="utf-8")
    for name in COMMANDS:
        assert f"| `specdec {name}` |" in text


def test_every_page_is_in_the_navigation():
    assert {page.name for page in PAGES if page.parent.name == "docs"} <= NAVIGATION


def test_pages_for_users_are_short():
    """README.md and the pages of docs/ in the navigation: at most 30,000 words, as `wc -w` counts them."""
    pages = [ROOT / "README.md", *(ROOT / "docs" / name for name in NAVIGATION if (ROOT / "docs" / name).exists())]
    words = {page.name: len(page.read_text(encoding="utf-8").split()) for page in pages}
    assert sum(words.values()) <= 30_000, words
