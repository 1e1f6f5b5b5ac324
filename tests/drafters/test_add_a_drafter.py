"""docs/add_a_drafter.md is followed from an empty folder: the toy drafter trains, saves, loads, decodes losslessly."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from helpers import run_here, tiny_target

from specdec import own
from specdec.__main__ import main
from specdec.drafters.formats import load_drafter, save_drafter

PAGE = (Path(__file__).parents[2] / "docs" / "add_a_drafter.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"```python file=(\S+)\n(.*?)```", PAGE, re.DOTALL))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder outside of the repository with the page's files, in which no code of the user's is known."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(own, "_passed", {})
    return tmp_path


def test_the_page(folder, monkeypatch):
    assert set(FILES) == {"toy.py"}
    assert len(FILES["toy.py"].strip().splitlines()) <= 42
    commands = re.findall(r"^    ((?:printf|specdec) .+)", PAGE, re.MULTILINE)
    assert len(commands) == 4
    commands.insert(1, "specdec generate --draft toy.py:create --tree 1/3/4 --prompt x --max-new-tokens 4")
    subprocess.run(commands[0], shell=True, check=True)
    for command in commands[1:]:
        monkeypatch.setattr(own, "_passed", {})  # each is a process of its own
        done = run_here(main, *shlex.split(command)[1:])
        assert done.returncode == 0, done.stderr
    assert "identical: yes" in done.stdout
    recipe = json.loads((folder / "runs/toy/draft/config.json").read_text())["recipe"]
    assert recipe == {"_target_": "toy.py:create", "width": 64, "init": "target"}


def test_a_checkpoint_does_not_choose_what_code_runs(folder, monkeypatch):
    target = tiny_target()
    drafter = load_drafter("toy.py:create", target)
    drafter.recipe = {"_target_": "toy.py:create"}
    save_drafter(drafter, folder / "draft", target)
    monkeypatch.setattr(own, "_passed", {})
    with pytest.raises(ValueError, match=r"pass your copy of the file too, as toy\.py:create:draft"):
        load_drafter("draft", target)
    load_drafter("toy.py:create:draft", target)
    for named in ("os.system", "specdec.drafters.formats.load_drafter", "specdec.drafters.ngram.os.system", "create"):
        drafter.recipe = {"_target_": named, "command": "true"}
        save_drafter(drafter, folder / "draft", target)
        for name in ("draft", "toy.py:create:draft"):
            with pytest.raises(ValueError, match=r"must be the function `create` of a file in drafters/"):
                load_drafter(name, target)
