"""One entry: `specdec` lists its commands without loading them, and every one of them explains itself."""

import subprocess
import sys
import tomllib
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import pytest

import specdec
from specdec import __main__ as entry
from specdec import api, registry

ROOT = Path(__file__).parents[2]


def shown(argv: list[str], capsys) -> str:
    """What the command prints, wherever it ends."""
    with suppress(SystemExit):
        entry.main(argv)
    return capsys.readouterr().out


def test_the_overview_fits_a_screen_and_names_every_command(capsys):
    lines = shown(["--help"], capsys).splitlines()
    assert lines == shown([], capsys).splitlines()
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 100
    of_lab = shown(["lab"], capsys).splitlines()
    for name in entry.COMMANDS:
        shown_in = of_lab if name in entry.LAB else lines
        assert sum(line.startswith(f"  {name}  ") for line in shown_in) == 1
    assert sum(line.startswith("  lab  ") for line in lines) == 1


def test_commands_of_the_lab_have_two_names_and_others_one():
    assert entry.split(["lab", "jobs", "parts=2"]) == entry.split(["jobs", "parts=2"]) == ("jobs", ["parts=2"])
    assert entry.split(["lab", "train"]) == ("lab", ["train"])


def test_the_overview_loads_no_command():
    program = "import sys; from specdec.__main__ import main; main(['--help']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize("name", entry.COMMANDS)
def test_every_command_explains_itself(name, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["specdec"])
    monkeypatch.setenv("COLUMNS", "100")
    lines = shown([name, "--help"], capsys).splitlines()
    assert lines[0].startswith(f"usage: specdec {name} ")
    assert len(lines) <= 62
    assert max(map(len, lines)) <= 100
    assert "python -m" not in lines[0]


@pytest.mark.parametrize("command", ["inspect", "check", "convert", "export"])
def test_the_doctor_explains_each_of_its_commands(command, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["specdec"])
    assert shown(["doctor", command, "--help"], capsys).startswith(f"usage: specdec doctor {command} ")


@pytest.mark.parametrize(
    ("name", "meant"),
    [("generat", "did you mean generate? "), ("chat", "did you mean generate --chat? "), ("zzz", "")],
)
def test_a_command_that_is_not_there(name, meant, capsys):
    with pytest.raises(SystemExit) as stop:
        entry.main([name])
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"error: there is no command {name!r}; {meant}specdec --help lists all\n"


def test_the_version(capsys):
    assert shown(["--version"], capsys) == f"{specdec.__version__}\n"
    long = shown(["--version", "--verbose"], capsys)
    assert {"specdec", "torch", "transformers", "system", "device", "cpu"} <= {
        x.split(":")[0] for x in long.splitlines()
    }


def test_everything_is_installed():
    """pip takes folders with an __init__.py, and of other files what package-data names."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    named = {f.resolve() for pattern in data["specdec"] for f in (ROOT / "specdec").glob(pattern)}
    named |= {f for f in (ROOT / "conf").rglob("*.yaml") if "conf/**/*.yaml" in data["specdec"]}
    for package in ("specdec", "drafters", "trees", "training", "conf"):
        files = [f for f in (ROOT / package).rglob("*") if f.is_file() and f.suffix != ".pyc"]
        for file in files:
            assert file in named or (file.suffix == ".py" and (file.parent / "__init__.py").is_file()), file


def test_the_interface_is_named_in_both_places():
    assert set(api.__all__) == {name for name, module in specdec.INTERFACE.items() if module == "specdec.api"}
    assert specdec.parse_tree is api.parse_tree


def test_the_target_node_of_hydra_has_the_fields_of_the_flags():
    node, of_flags = registry.settings("target", "demo"), {f.name: f.default for f in fields(api.ModelSettings)}
    assert node.pop("path") == of_flags["target"]
    assert node == {name: of_flags[name] for name in ("dtype", "matmul_precision", "device_map")}
