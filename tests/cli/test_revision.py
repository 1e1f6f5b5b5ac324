"""Results name the commit of the code, even without git, and never that of other code."""

import os
import re
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
    answers = {"ls-files": "specdec/cli/revision.py", "rev-parse": "abc123", "status": ""}
    monkeypatch.setattr(revision, "_git", lambda *words: answers[words[0]])
    assert revision.revision() == "abc123"
    answers["status"] = " M specdec/lab/machine.py"
    assert revision.revision() == "abc123+changes"


def test_only_a_repository_of_this_code_names_the_commit_and_it_is_not_locked(monkeypatch, tmp_path):
    def git(*words):
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    code = tmp_path / "specdec" / "cli" / "revision.py"
    code.parent.mkdir(parents=True)
    code.touch()
    git("init")
    git("commit", "--allow-empty", "-m", "others")
    monkeypatch.setattr(revision, "ROOT", tmp_path)
    assert revision.revision() is None
    git("add", "specdec")
    git("commit", "-m", "ours")
    os.utime(code, (0, 0))  # git status would write the index anew
    index = tmp_path / ".git" / "index"
    before = index.read_bytes()
    assert re.fullmatch("[0-9a-f]{40}", str(revision.revision()))
    assert index.read_bytes() == before


def test_packages_have_the_versions_of_the_constraints_and_serve_the_python_asked_for(monkeypatch, tmp_path, capsys):
    hydra, *_, pydantic, antlr = gpu_wheels.wanted()
    assert hydra.startswith("hydra-core==1.")
    assert pydantic.startswith("pydantic==2.")
    monkeypatch.setattr(gpu_wheels.subprocess, "run", pip := Mock(return_value=Mock(returncode=0)))
    monkeypatch.setattr(sys, "argv", ["gpu_wheels.py", "--out", str(tmp_path), "--python", "3.12"])
    gpu_wheels.main()
    commands = {call.args[0][-1]: call.args[0] for call in pip.call_args_list}
    assert commands.keys() == set(gpu_wheels.wanted())
    assert commands[pydantic][commands[pydantic].index("--python-version") + 1] == "3.12"  # its core is compiled
    assert "--no-deps" in commands[antlr]  # it comes as source
    assert not (tmp_path / "REVISION").exists()
    assert hydra in capsys.readouterr().out
