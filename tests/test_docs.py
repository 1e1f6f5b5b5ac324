"""README.md and docs/ name files, links, modules and commands that there are. docs/log.md, a history, is left out."""

import importlib.util
import pkgutil
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from specdec import registry
from specdec.__main__ import split
from specdec.cli.commands import COMMANDS, parser_of, with_slots
from specdec.cli.hydra_words import hydra_words

ROOT = Path(__file__).parents[1]
FOLDERS = "specdec|drafters|trees|training|conf|scripts|tests|docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(page for page in (ROOT / "docs").glob("*.md") if page.name != "log.md"),
]
MADE_UP = ("NAME", "toy")  # docs/architecture.md's placeholder; the drafter that docs/add_a_drafter.md makes


def found(pattern: str, page: Path) -> set[str]:
    """What the pattern finds on a page, less what the page makes up."""
    names = {name.rstrip(".") for name in re.findall(pattern, page.read_text(encoding="utf-8"))}
    return {name for name in names if not any(word in name for word in MADE_UP)}


@pytest.fixture(params=PAGES, ids=lambda page: page.name)
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


def test_python_blocks_run(page, tmp_path, monkeypatch):
    """The blocks of a page run in order, in one namespace. Blocks that are files, and clients of a server, compile."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": page.stem}
    for where, block in re.findall(r"```python(.*)\n([\s\S]*?)```", page.read_text(encoding="utf-8")):
        code = compile(block, page.name, "exec")
        if not where and "import openai" not in block:
            exec(code, names)


def test_every_command_is_listed():
    text = (ROOT / "docs" / "reference_commands.md").read_text(encoding="utf-8")
    for name in COMMANDS:
        assert f"| `specdec {name}` |" in text


def test_every_page_is_in_the_navigation():
    pages = set(re.findall(r'"(\w+\.md)"', (ROOT / "zensical.toml").read_text(encoding="utf-8")))
    assert pages >= {page.name for page in PAGES if page.parent.name == "docs"}


def commands(page: Path) -> list[list[str]]:
    """The commands `specdec NAME ...` in the indented lines of a page. Those that end with ... are only begun."""
    text = (
        page.read_text(encoding="utf-8").replace("\\\n", " ").replace("python -m specdec.generate", "specdec generate")
    )
    lines = [line.partition(" #")[0].strip() for line in text.splitlines() if line.startswith("    specdec ")]
    return [shlex.split(line)[1:] for line in lines if not line.endswith("...") and "toy" not in line]


def understood(lines: list[list[str]]) -> Iterator[tuple[str, list[str]]]:
    """Names and words of the commands, also of those that `specdec lab jobs` runs, without those of launchers."""
    for name, rest in map(split, lines):
        if name == "lab jobs":
            cut = rest.index("--")
            yield from understood([[word.format(part=0, parts=1) for word in rest[cut + 1 :]]])
            rest = rest[:cut]
        if "--multirun" in rest:  # the first of each setting's values
            rest = [re.sub(r"^([\w.]+=[^,\[]+),.*", r"\1", word) for word in rest if word != "--multirun"]
        yield name, [word for word in rest if not word.startswith("hydra")]


def test_commands_are_understood(page):
    """Every flag and every setting is one that its command has."""
    for name, rest in understood(commands(page)):
        command = COMMANDS[name]
        if "--cfg" in rest:
            continue
        if command.conf:
            with initialize_config_dir(str(registry.CONF), version_base="1.3"):
                compose(command.conf, hydra_words(command.conf, command.words, {}, rest))
        else:
            parser_of(name).parse_args(with_slots(command, rest))
