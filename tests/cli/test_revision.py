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


def test_packages_have_the_versions_of_the_constraints(monkeypatch, tmp_path, capsys):
    hydra, omegaconf, antlr = gpu_wheels.wanted()
    assert hydra.startswith("hydra-core==1.")
    assert omegaconf.startswith("omegaconf==2.")
    monkeypatch.setattr(gpu_wheels, "install", install := Mock())
    (tmp_path / f"hydra_core-{hydra.split('==')[1]}.dist-info").mkdir()
    monkeypatch.setattr(sys, "argv", ["gpu_wheels.py", "--out", str(tmp_path)])
    gpu_wheels.main()
    assert [call.args[0] for call in install.call_args_list] == [[omegaconf, antlr]]  # what is there is not made again
    assert not (tmp_path / "REVISION").exists()
    assert hydra in capsys.readouterr().out


def test_a_package_that_fits_one_machine_only_is_refused(monkeypatch, tmp_path):
    wheel = tmp_path / "torch-2.0.dist-info" / "WHEEL"
    wheel.parent.mkdir()
    monkeypatch.setattr(gpu_wheels, "_run", lambda command: wheel.write_text("Tag: cp311-cp311-linux_x86_64\n"))
    with pytest.raises(ValueError, match=r"torch-2\.0\.dist-info is not pure Python"):
        gpu_wheels.install(["torch==2.0"], tmp_path)
