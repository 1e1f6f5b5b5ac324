"""Scripts start from any folder, and find their own checkout."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from specdec.lab.output import command_line

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("script", sorted((ROOT / "scripts").glob("*.py")), ids=lambda path: path.stem)
def test_every_script_finds_its_checkout_before_it_imports_from_it(script):
    lines = [line for line in script.read_text(encoding="utf-8").splitlines() if line.startswith(("import ", "from "))]
    ours = [line.split()[1].split(".")[0] for line in lines]
    assert "specdec" not in ours or ours.index("checkout") < ours.index("specdec")


def test_a_script_from_another_folder_and_its_child_import_this_checkout(tmp_path):
    """Without any help from the environment or from what is installed."""
    (tmp_path / "specdec").mkdir()
    (tmp_path / "specdec" / "__init__.py").write_text("raise ImportError('another specdec')")
    child = "import specdec; print(specdec.__file__)"
    code = (
        f"import sys; sys.path[0] = {str(ROOT / 'scripts')!r}; import checkout, specdec, subprocess; "
        f"print(specdec.__file__, flush=True); subprocess.run([sys.executable, '-P', '-c', {child!r}])"
    )
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if Path(path).resolve() != ROOT]
    how = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": os.pathsep.join(others)}}
    done = subprocess.run([sys.executable, "-c", code], **how, capture_output=True, text=True, check=False)
    assert done.stdout.split() == [str(ROOT / "specdec" / "__init__.py")] * 2, done.stderr


@pytest.mark.parametrize(
    ("arguments", "module", "command"),
    [
        (["specdec sweep", "topk=[1,4]"], "specdec.__main__", "specdec sweep 'topk=[1,4]'"),
        (["/anywhere/kernels.py", "--nodes", "9"], "specdec.lab.kernels", "python -m specdec.lab.kernels --nodes 9"),
        (["scripts/gpu_proof.py", "--tiny"], None, "python scripts/gpu_proof.py --tiny"),
    ],
)
def test_results_name_the_command_as_one_types_it(monkeypatch, arguments, module, command):
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", module and SimpleNamespace(name=module), raising=False)
    assert command_line() == command
