"""Who may import whom (docs/structures.md)."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOTS_OF_COMPOSITION = {
    "specdec.api",
    "specdec.command",
    "specdec.generate",
    "specdec.tune",
    "specdec",
    "drafters.formats.__main__",
    "drafters.formats.check",
    "specdec.lab.prove",
    "specdec.prove",
}
ALLOWED = {
    "specdec.types": set(),
    "specdec.kernels": {"specdec.kernels"},
    "specdec.products": set(),
    "specdec.layers": {"specdec.kernels", "specdec.products"},
    "specdec.cache": {"specdec.kernels"},
    "specdec.cli": set(),
    "specdec.trace": set(),
    "specdec.checkpoint": set(),
    "specdec.attention": {"specdec.cache", "specdec.kernels"},
    "specdec.archs": {"specdec.layers", "specdec.archs"},
    "specdec.tree": {"specdec.types"},
    "specdec.sampling": {"specdec.kernels", "specdec.types"},
    "specdec.verify": {"specdec.types", "specdec.sampling", "specdec.verify"},
    "specdec.model": {f"specdec.{m}" for m in ("archs", "attention", "cache", "kernels", "layers")},
    "specdec.adapter": {f"specdec.{m}" for m in ("archs", "attention", "cache", "layers")},
    "specdec.loader": {f"specdec.{m}" for m in ("adapter", "archs", "checkpoint", "model")},
    "specdec.text": {"specdec.model"},
    "specdec.screen": {f"specdec.{m}" for m in ("engine", "text", "tree")},
    "specdec.penalties": {"specdec.types"},
    "specdec.rows": {"specdec.trace", "specdec.types"},
    "specdec.live": {f"specdec.{m}" for m in ("cache", "rows", "sampling", "types")},
    "specdec.late": {f"specdec.{m}" for m in ("cache", "live", "rows", "types")},
    "specdec.graphs": {f"specdec.{m}" for m in ("cache", "kernels", "late", "live", "rows", "trace", "types")},
    "specdec.memory": {f"specdec.{m}" for m in ("model", "types")},
    "specdec.engine": {
        f"specdec.{m}"
        for m in (
            "cache",
            "graphs",
            "late",
            "live",
            "memory",
            "model",
            "penalties",
            "rows",
            "sampling",
            "trace",
            "types",
            "verify",
        )
    },
    "specdec.lab": {"specdec.lab"} | {f"specdec.{m}" for m in ("api", "engine", "model", "trace", "types")},
    "specdec.lab.record": {"specdec.__version__"}
    | {f"specdec.{m}" for m in ("checkpoint", "engine", "sampling", "trace", "types", "verify")},
    "specdec.lab.greedy": {f"specdec.{m}" for m in ("engine", "model", "types")},
    "specdec.lab.laws": {"drafters.vocab"} | {f"specdec.{m}" for m in ("sampling", "tree", "types")},
    "specdec.lab.sampled": {"specdec.lab.laws"} | {f"specdec.{m}" for m in ("engine", "model", "sampling", "types")},
    "specdec.lab.metrics": {"specdec.lab.record", "specdec.trace", "specdec.cli"},
    "specdec.lab.outcomes": {"trees"},
    "specdec.lab.superset": {"specdec.lab.outcomes", "trees"}
    | {f"specdec.{m}" for m in ("checkpoint", "trace", "types")},
    "specdec.lab.replay": {"specdec.lab", "drafters.vocab", "trees"}
    | {f"specdec.{m}" for m in ("engine", "model", "sampling", "text", "types")},
    "specdec.settings": set(),
    "specdec.lab.tune": {"specdec.lab", "specdec.settings"} | {f"specdec.{m}" for m in ("engine", "types")},
    "specdec.lab.simulate": {"specdec.lab", "trees.optimal"} | {f"specdec.{m}" for m in ("archs", "checkpoint", "cli")},
    "specdec.lab.benchmarks": {f"specdec.{m}" for m in ("engine", "model", "text", "types")} | {"training.data"},
    "specdec.lab.diagnose": {f"specdec.{m}" for m in ("engine", "types")}
    | {f"specdec.lab.{m}" for m in ("metrics", "record")},
    "specdec.lab.points": {f"specdec.{m}" for m in ("api", "checkpoint", "model", "types", "lab.compare")},
    "specdec.lab.store": {"specdec.checkpoint"} | {f"specdec.lab.{m}" for m in ("points", "record", "show")},
    "specdec.lab.sweep": {f"specdec.{m}" for m in ("api", "engine", "model", "types")}
    | {f"specdec.lab.{m}" for m in ("benchmarks", "diagnose", "metrics", "points", "record", "store")}
    | {"trees.optimal"},
    "specdec.lab.shapes": {f"specdec.{m}" for m in ("archs", "layers", "model")}
    | {"drafters.eagle3", "drafters.vocab"},
    "specdec.lab.memory": {"specdec.products"},
    "specdec.lab.contenders": {f"specdec.{m}" for m in ("engine", "lab.memory", "trace", "types", "verify")},
    "specdec.lab.bench": {"specdec.types"}
    | {f"specdec.lab.{m}" for m in ("contenders", "memory", "record", "simulated")},
    "specdec.lab.bench_table": set(),
    "specdec.lab.stages": set(),
    "specdec.lab.drift": {"specdec.engine", "specdec.types"},
    "specdec.lab.simulated": {f"specdec.{m}" for m in ("types", "verify")},
    "specdec.lab.figures": set(),
    "specdec.lab.gallery": set(),
    "specdec.lab.report": {"specdec.__version__"}
    | {f"specdec.lab.{m}" for m in ("figures", "gallery", "show", "store")},
    "drafters": {"drafters"}
    | {f"specdec.{m}" for m in ("types", "layers", "cache", "attention", "archs", "checkpoint", "model")},
    "drafters.draft_model": {"drafters.vocab"}
    | {f"specdec.{m}" for m in ("types", "cache", "checkpoint", "loader", "model")},
    "trees": {"trees", "specdec.types", "specdec.tree", "specdec.sampling"},
    "training": {"training", "specdec", "drafters"},
    "training.evaluate": {"training", "specdec", "drafters", "trees"},
}
PACKAGES = ("specdec", "drafters", "trees", "training")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{a.name}" for a in node.names} if node.module in PACKAGES else {node.module}
        elif isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
    return {name for name in found if name.split(".")[0] in PACKAGES}


def rule_of(module: str) -> set[str]:
    while module not in ALLOWED:
        assert "." in module, f"{module} has no rule: add one to ALLOWED and to docs/structures.md"
        module = module.rsplit(".", 1)[0]
    return ALLOWED[module]


def test_import_directions():
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            module = module_name(path)
            if module in ROOTS_OF_COMPOSITION:
                continue
            rule = rule_of(module)
            for name in imports(path):
                assert any(name == a or name.startswith(a + ".") for a in rule), f"{module} must not import {name}"


def test_files_and_functions_stay_readable():
    for package in (*PACKAGES, "scripts", "benchmarks"):
        for path in (ROOT / package).rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            assert len(path.read_text(encoding="utf-8").splitlines()) <= 400, path
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef):
                    assert node.end_lineno - node.lineno < 75, f"{path.name}: {node.name} is too long to read at once"
