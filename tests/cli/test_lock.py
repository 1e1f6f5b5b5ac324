"""Two processes and one output: the second is refused, or waits; the lock of a dead owner is free."""

import errno
import json
import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest
from short_runs import CONVERSATIONS
from wrong_cases import call

from specdec.cli.lock import only_writer

HOLD = "import sys; from pathlib import Path; from specdec.cli.lock import only_writer\n"
HOLD += "with only_writer(Path(sys.argv[1]), inside=sys.argv[2] == 'inside'):\n    print('held', flush=True); input()\n"


@contextmanager
def other_process(out: Path, inside: bool = False):
    """Another process that holds `out`."""
    command = [sys.executable, "-c", HOLD, str(out), "inside" if inside else "outside"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("inside", [False, True])
def test_the_second_is_refused_and_a_dead_owner_is_not_in_the_way(inside, tmp_path, capsys):
    out = tmp_path / "out"
    with other_process(out, inside) as owner:
        with (
            pytest.raises(ValueError, match=f"written by process {owner.pid} on {socket.gethostname()}: wait for it"),
            only_writer(out, inside),
        ):
            pass
        owner.kill()
        owner.wait()
        with only_writer(out, inside):
            pass
    assert f"process {owner.pid} on {socket.gethostname()}" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*lock"))


def test_who_waits_gets_it_in_the_end(tmp_path):
    with other_process(tmp_path / "out") as owner:
        owner.stdin.write("\n")
        owner.stdin.flush()
        with only_writer(tmp_path / "out", wait=True):
            assert owner.wait(timeout=60) == 0


def test_two_names_of_one_output_are_one(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "out")
    with (
        other_process(tmp_path / "out"),
        pytest.raises(ValueError, match="is being written by process"),
        only_writer(tmp_path / "link"),
    ):
        pass


def test_where_nothing_was_written_nothing_is_left(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
        with pytest.raises(ValueError, match=r"out: No space left on device$"), only_writer(tmp_path / "a" / "out"):
            pass
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="no"), only_writer(tmp_path / "a" / "b" / "out"):
        raise ValueError("no")
    assert list(tmp_path.iterdir()) == []
    with only_writer(tmp_path / "a" / "out"):
        (tmp_path / "a" / "out").write_text("x")
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["out"]
    for path in ("/proc/none/out", "/proc/out"):
        with pytest.raises(ValueError, match=f"cannot write {path}"), only_writer(Path(path)):
            pass


@pytest.mark.parametrize(
    "words",
    [
        ("regenerate", "--prompts", "p.txt", "--out", "out.jsonl"),
        ("tune", "--prompts", "p.txt", "--out", "out"),
        ("generate", "--prompt", "x", "--trace", "out"),
        ("train", "data.path=p.jsonl", "out=out"),
        ("cache", "data.path=p.jsonl", "out=out"),
    ],
)
def test_commands_refuse_what_another_process_writes(words, tmp_path):
    (tmp_path / "p.txt").write_text("What is a tree?\n")
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"messages": c}) + "\n" for c in CONVERSATIONS))
    with other_process(tmp_path / words[-1].removeprefix("out="), inside="data.path=p.jsonl" in words) as owner:
        code, err = call(words, tmp_path)
    assert code == 2
    assert f"process {owner.pid} on" in err
