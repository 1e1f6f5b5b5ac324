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
"""

import importlib.util
import pkgutil
import re
import tomllib
from pathlib import Path

import pytest
from blocks import ROOT, blocks, check_calls, check_command, lines_of, understand

from specdec.__main__ import split
from specdec.cli.commands import COMMANDS, parser_of
from specdec.cli.flags import FLAGS, dashed
from specdec.cli.settings import with_settings
from specdec.model.hf_place import read_map
from specdec.own import POINTS
from specdec.serve.protocol import ChatAsk

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
