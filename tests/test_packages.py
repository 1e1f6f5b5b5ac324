"""Every package that is imported is declared in pyproject.toml, and every declared one is imported."""

import ast
import re
import sys
import tomllib
from pathlib import Path

from specdec.cli.jobs import LAUNCHERS

ROOT = Path(__file__).parents[1]
ROOMS = ("specdec", "drafters", "trees", "training", "conf", "scripts")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
UNIMPORTED = ("test", "docs")  # programs and their plugins
OPTIONAL = [requirement for extra, those in EXTRAS.items() if extra not in UNIMPORTED for requirement in those]
MODULES = {"hydra-core": "hydra", "pyyaml": "yaml", "fonttools": "fontTools"}  # where the name is not the module's
PLUGIN = {"vllm"}  # imports training/vllm_side/hidden_state_files.py itself
# Loaded by Hydra, transformers, torch and uvicorn.
LOADED = {*LAUNCHERS.values(), "torchao", "tensorboard", "httptools", "uvloop"}
TOOLS = {"pytest-xdist", "ruff", "mypy"}  # that `make test` and `make types` call without an import


def declared(requirements: list[str]) -> dict[str, str]:
    """{module: name} of requirements."""
    names = [re.match(r"[\w.-]+", requirement)[0] for requirement in requirements]
    return {MODULES.get(name, name.replace("-", "_")): name for name in names}


def imports(path: Path) -> tuple[set[str], set[str]]:
    """Modules of other projects that a file imports: when it is imported itself, and anywhere in it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {id(node) for function in ast.walk(tree) if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
              for node in ast.walk(function)}  # fmt: skip
    at_once, anywhere = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {node.module}
        else:
            continue
        anywhere |= names
        if id(node) not in inside:
            at_once |= names
    own = {*ROOMS, "tests", *sys.stdlib_module_names, *(p.stem for p in path.parent.glob("*.py"))}
    own |= {p.stem for folder in ("tests", "scripts") for p in (ROOT / folder).rglob("*.py")}
    return tuple({name.split(".")[0] for name in names} - own for names in (at_once, anywhere))


def imported(*folders: str) -> tuple[set[str], set[str]]:
    found = [imports(path) for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return set().union(*(f[0] for f in found)), set().union(*(f[1] for f in found))


def test_what_the_program_imports_is_what_is_declared():
    needed, optional = declared(PROJECT["dependencies"]), declared(OPTIONAL)
    at_once, anywhere = (found - PLUGIN for found in imported(*ROOMS))
    assert anywhere | LOADED == set(needed) | set(optional)
    # `specdec serve` looks for its extra before it imports the modules next to it.
    server = {module for module in imported("specdec/serve")[0] if module in declared(EXTRAS["serve"])}
    files = (path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    others = {module for path in files if path.parent.name != "serve" for module in imports(path)[0]}
    assert at_once - server <= set(needed), "extras are imported where they are used, and refused there if missing"
    assert not server & others


def test_what_the_tests_import_is_what_is_declared():
    needed, test = declared(PROJECT["dependencies"]), declared(EXTRAS["test"])
    _, anywhere = imported("tests")
    compared = {"speculators", "tensorboard"}  # where they are installed
    assert anywhere - compared <= set(needed) | set(test)
    optional = declared(OPTIONAL)  # tested where installed
    assert {name for module, name in test.items() if module not in anywhere | set(optional)} <= TOOLS


def test_every_declared_package_has_a_version_that_is_tested():
    pinned = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    everything = {**declared(PROJECT["dependencies"]), **declared([r for extra in EXTRAS.values() for r in extra])}
    assert set(everything.values()) <= set(pinned)
