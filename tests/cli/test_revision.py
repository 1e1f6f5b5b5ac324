"""Results name the commit of the code, even without git, and never that of other code."""

import subprocess
import sys
from unittest.mock import Mock

import pytest
import torch

from scripts import gpu_wheels
from specdec.cli import revision
from specdec.lab.output import provenance


@pytest.fixture
def note(monkeypatch, tmp_path):
    """A machine without git, and a place for the note."""
    monkeypatch.setattr(subprocess, "run", Mock(side_effect=FileNotFoundError("git")))
    monkeypatch.setattr(revision, "NOTE", tmp_path / "wheels" / "REVISION")
    (tmp_path / "wheels").mkdir()
    return revision.NOTE


def test_without_git_the_note_tells_the_commit(note):
    assert revision.revision() is None
    note.write_text(f"abc123 {revision.code_digest()}\n")
    assert revision.revision() == "abc123"
    assert provenance(torch.device("cpu"))["revision"] == "abc123"


def test_a_note_of_other_code_tells_nothing(note, monkeypatch, tmp_path):
    note.write_text(f"abc123 {revision.code_digest()}\n")
    monkeypatch.setattr(revision, "ROOT", tmp_path)
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "new.py").write_text("")
    assert revision.revision() is None
    note.write_text("half a no")
    assert revision.revision() is None


def test_changes_are_reported(monkeypatch):
    answers = {"rev-parse": "abc123", "status": ""}
    monkeypatch.setattr(revision, "_git", lambda *words: answers[words[0]])
    assert revision.revision() == "abc123"
    answers["status"] = " M specdec/lab/machine.py"
    assert revision.revision() == "abc123+changes"


def test_packages_have_the_versions_of_the_constraints_and_serve_the_python_asked_for(monkeypatch, tmp_path, capsys):
    hydra, *_, pydantic, antlr = gpu_wheels.wanted()
    assert hydra.startswith("hydra-core==1.")
    assert pydantic.startswith("pydantic==2.")
    monkeypatch.setattr(gpu_wheels, "_run", pip := Mock())
    monkeypatch.setattr(sys, "argv", ["gpu_wheels.py", "--out", str(tmp_path), "--python", "3.12"])
    gpu_wheels.main()
    commands = {call.args[0][-1]: call.args[0] for call in pip.call_args_list}
    assert commands.keys() == set(gpu_wheels.wanted())
    assert commands[pydantic][commands[pydantic].index("--python-version") + 1] == "3.12"  # its core is compiled
    assert "--no-deps" in commands[antlr]  # it comes as source
    assert not (tmp_path / "REVISION").exists()
    assert hydra in capsys.readouterr().out
