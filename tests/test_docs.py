"""README.md and docs/ name files, modules and links that there are. docs/log.md, a history, is left out."""

import importlib.util
import pkgutil
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("specdec", "drafters", "trees", "training", "lab")
FOLDERS = "|".join((*PACKAGES, "conf", "scripts", "tests", "docs"))
PAGES = [ROOT / "README.md", *sorted(page for page in (ROOT / "docs").glob("*.md") if page.name != "log.md")]
MADE_UP = ("NAME", "toy")  # docs/structures.md's placeholder; the drafter that docs/add_a_drafter.md makes


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
    for link in found(r"\]\(([^)#:]+)\)", page):
        assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_modules_can_be_run(page):
    for name in found(rf"-m ((?:{'|'.join(PACKAGES)})[\w.]*)", page):
        assert importlib.util.find_spec(name), f"{page.name} runs {name}"


def test_names_can_be_imported(page):
    for name in found(rf"(?<![\w/.-])(?:{'|'.join(PACKAGES)})(?:\.[A-Za-z_]\w*)+", page):
        pkgutil.resolve_name(name)
