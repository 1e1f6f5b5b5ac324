"""Scripts start from any folder, and find the checkout that they lie in."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from specdec.lab.machine import command_line

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "scripts").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_script_finds_its_checkout_before_it_imports_from_it(script):
    if script.stem == "checkout":
        return
    lines = [line for line in script.read_text(encoding="utf-8").splitlines() if line.startswith(("import ", "from "))]
    ours = [line.split()[1].split(".")[0] for line in lines]
    packages = {"specdec"}
    if not packages & set(ours):
        return
    assert ours.index("checkout") < min(i for i, name in enumerate(ours) if name in packages)


def without_this_checkout() -> dict[str, str]:
    """The environment, but for the place where tests find this checkout; other packages may be found by it."""
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if Path(path).resolve() != ROOT]
    return os.environ | {"PYTHONPATH": os.pathsep.join(others)}


def test_a_script_from_another_folder_and_its_child_import_this_checkout(tmp_path):
    """Without any help from the environment or from what is installed."""
    (tmp_path / "specdec").mkdir()
    (tmp_path / "specdec" / "__init__.py").write_text("raise ImportError('another specdec')")
    child = "import specdec; print(specdec.__file__)"
    code = (
        f"import sys; sys.path[0] = {str(ROOT / 'scripts')!r}; import checkout, specdec, subprocess; "
        f"print(specdec.__file__, flush=True); subprocess.run([sys.executable, '-c', {child!r}])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=without_this_checkout(), capture_output=True, text=True
    )
    here = str(ROOT / "specdec" / "__init__.py")
    assert done.stdout.split()[0] == here, done.stderr


def test_the_help_of_a_script_from_another_folder(tmp_path):
    command = [sys.executable, str(ROOT / "scripts" / "pretrain_target.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=without_this_checkout(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--seconds" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "module", "told"),
    [
        (["specdec sweep", "topk=[1,4]"], "specdec.__main__", "specdec sweep 'topk=[1,4]'"),
        (
            ["/anywhere/kernels.py", "--nodes", "9"],
            "specdec.lab.bench.kernels",
            "python -m specdec.lab.bench.kernels --nodes 9",
        ),
        (["scripts/gpu_proof.py", "--tiny"], None, "python scripts/gpu_proof.py --tiny"),
    ],
)
def test_results_name_the_command_as_one_types_it(monkeypatch, arguments, module, told):
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", module and SimpleNamespace(name=module), raising=False)
    assert command_line() == told
