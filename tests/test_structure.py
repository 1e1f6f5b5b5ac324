"""The allowed imports (docs/architecture.md), and how long a file or a function may be.

python tests/test_structure.py prints the counts.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINKED = ("drafters", "trees", "training", "conf")  # folders that `specdec` links to: their modules are specdec.NAME
# The rooms, lowest first: a room may import from itself and from those above it in this list. Rooms of one line are
# neighbours, which do not know each other.
ROOMS = [
    ["specdec.ranks", "specdec.threads", "specdec.vocabulary", "specdec.schema", "specdec.own"],
    ["specdec.cli.reading"],
    ["specdec.cli.limits", "specdec.sampling_settings"],
    [
        "specdec.structs",
        "specdec.acceptance",
        "specdec.machine",
        "specdec.registry",
        "specdec.cli.errors",
        "specdec.cli.files",
        "specdec.cli.lock",
        "specdec.cli.revision",
        "specdec.cli.terminal",
    ],
    ["specdec.cli.hydra_settings"],
    ["specdec.cli.flags"],
    ["specdec.cli.parser"],
    ["specdec.cli.hydra_words"],
    ["specdec.ops"],
    ["specdec.model"],
    ["specdec.sampling"],
    ["specdec.contracts"],
    ["specdec.children"],
    ["specdec.verify"],
    ["specdec.text", "specdec.remote"],
    ["specdec.engine"],
    ["specdec.recording"],
    ["specdec.trees", "specdec.drafters"],
    ["specdec.tuning", "specdec.model_settings"],
    ["specdec.arguments"],
    ["specdec.api"],
    ["specdec.training", "specdec.serve"],
    ["specdec.lab"],
]
# Commands put the pieces together: these may import from every room, and nobody imports from them but the lab.
COMPOSITION = ("specdec", "specdec.generate", "specdec.train", "specdec.cli")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join(("specdec", *parts) if parts[0] in LINKED else parts)


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            found |= (
                {f"{node.module}.{a.name}" for a in node.names}
                if node.module in ("specdec", *(f"specdec.{name}" for name in LINKED))
                else {node.module}
            )
        elif isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
    return {name for name in found if name.split(".")[0] == "specdec"}


def room_of(module: str) -> tuple[int, str] | None:
    """Height and name of a module's room; None for what composes."""
    while module:
        for height, rooms in enumerate(ROOMS):
            if module in rooms:
                return height, module
        if module in COMPOSITION:
            return None
        module = module.rpartition(".")[0]
    raise AssertionError(f"{module} lies in no room: add it to ROOMS and to docs/architecture.md")


def upward_edges() -> list[str]:
    wrong = []
    for path in modules():
        room = room_of(module_name(path))
        for name in imports(path) if room else ():
            other = room_of(name)
            if other is None and name != "specdec.__version__" and room[1] != "specdec.lab":
                wrong.append(f"{module_name(path)} must not import {name}, which composes")
            elif other is not None and other != room and other[0] >= room[0]:
                wrong.append(f"{module_name(path)} must not import {name}")
    return wrong


def test_arrows_run_one_way():
    assert upward_edges() == []


def modules() -> list[Path]:
    return sorted(path for folder in ("specdec", *LINKED) for path in (ROOT / folder).rglob("*.py"))


def files() -> list[Path]:
    return [*modules(), *sorted((ROOT / "scripts").rglob("*.py"))]


def test_no_module_has_the_name_of_a_standard_one():
    """Python puts the folder of a script first on its path: there, such a module takes the standard one's place."""
    names = {part for path in modules() for part in path.relative_to(ROOT).with_suffix("").parts}
    assert names & set(sys.stdlib_module_names) == set()


def test_linked_folders_are_imported_below_specdec_only():
    """`import drafters` in a checkout would load every module a second time."""
    wrong = re.compile(rf"^\s*(from|import) ({'|'.join(LINKED)})\b", re.MULTILINE)
    files = [*modules(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]
    assert [str(path) for path in files if wrong.search(path.read_text(encoding="utf-8"))] == []


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def functions() -> Iterator[tuple[int, str]]:
    """Lines and name of every function."""
    for path in files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node.end_lineno - node.lineno + 1, f"{path.relative_to(ROOT)}: {node.name}"


def test_files_and_functions_stay_readable():
    for path in files():
        assert lines_of(path) <= 300, path
    for length, name in functions():
        assert length <= 60, f"{name} is too long to read at once"


if __name__ == "__main__":
    room, most = Counter(path.parent.relative_to(ROOT) for path in files()).most_common(1)[0]
    length, longest = max((lines_of(path), path.relative_to(ROOT)) for path in files())
    lines, function = max(functions())
    print(f"largest room: {room}, {most} files")
    print(f"imports upward: {len(upward_edges())}")
    print(f"longest file: {longest}, {length} lines")
    print(f"longest function: {function}, {lines} lines")
