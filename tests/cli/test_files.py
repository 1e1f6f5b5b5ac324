"""Files and folders are there whole or not at all, and one module alone writes a partial file and renames it."""

import ast
import errno
import json
import lzma
import os
import re
import stat
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file

from specdec.cli import checks, files
from specdec.cli.commands import parse
from specdec.cli.reading import MOST_LINE, lines_of
from specdec.text import read_prompts
from specdec.training.data import Tally, read_records

ROOT = Path(__file__).parents[2]


class Killed(BaseException):
    """Ends the process as SIGKILL would: nothing of ours catches it."""


full, killed = Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))), Mock(side_effect=Killed)


def replace(folder: Path, text: str, fill=None) -> None:
    files.replace_folder(folder, fill or (lambda staging: (staging / "a").write_text(text)), ("a",), "a thing")


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def assert_whole(folder: Path, text: str) -> None:
    """It has this text, and nothing is next to it."""
    assert names(folder.parent) == [folder.name]
    assert (folder / "a").read_text() == text


def test_a_file_appears_when_it_is_whole(tmp_path):
    def look(staging: Path) -> None:
        assert names(tmp_path) == []
        staging.write_text("x")
        assert staging == files.partial_path(tmp_path / "a")

    files.write_whole(tmp_path / "a", look)
    files.write_text(tmp_path / "b", "ü")
    files.partial_path(tmp_path / "c").write_text("z")
    files.put_in_place(tmp_path / "c")
    assert [(tmp_path / name).read_bytes() for name in names(tmp_path)] == [b"x", "ü".encode(), b"z"]


def test_a_link_stays_and_what_it_names_is_written(tmp_path):
    there = tmp_path / "there"
    there.mkdir()
    for name in ("file", "folder"):
        (tmp_path / name).symlink_to(there / name)  # of nothing at first
    for text in ("old", "new"):
        files.check_writable(tmp_path / "file")
        files.check_makeable(tmp_path / "folder")
        files.write_text(tmp_path / "file", text)
        replace(tmp_path / "folder", text)
        assert (names(there), names(tmp_path)) == (["file", "folder"], ["file", "folder", "there"])
        assert all((tmp_path / name).is_symlink() for name in ("file", "folder"))
        assert [(there / name).read_text() for name in ("file", "folder/a")] == [text, text]


def test_a_pipe_or_a_device_is_written_and_stays(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    files.check_writable(pipe)
    files.write_text(pipe, "x")
    assert os.read(reader, 9) == b"x"
    os.close(reader)
    assert names(tmp_path) == ["pipe"]
    assert pipe.is_fifo()


@pytest.mark.parametrize("what", ["fill", "fsync", "replace"])
def test_a_file_that_cannot_be_written_leaves_the_old_one_alone(tmp_path, monkeypatch, what):
    files.write_text(tmp_path / "a", "old")
    if what != "fill":
        monkeypatch.setattr(os, what, full)
    with pytest.raises(ValueError, match=r"^cannot write .*/a: No space left on device$"):
        files.write_whole(tmp_path / "a", lambda staging: full() if what == "fill" else staging.write_text("new"))
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a").read_text() == "old"


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_all_files_of_a_folder_are_as_private_as_the_umask_says(tmp_path, mask):
    before = os.umask(mask)
    try:
        replace(tmp_path / "folder", "", lambda staging: save_file({"a": torch.zeros(1)}, staging / "a"))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "folder" / "a").stat().st_mode) == 0o666 & ~mask


@pytest.mark.parametrize("error", [RuntimeError("a bug"), KeyboardInterrupt(), TypeError("a bug")])
def test_what_is_not_the_disks_fault_is_reported_as_it_is_and_leaves_nothing(tmp_path, error):
    def fill(staging: Path) -> None:
        staging.write_text("half")
        raise error

    with pytest.raises(type(error)):
        files.write_whole(tmp_path / "a", fill)
    assert names(tmp_path) == []


def test_torchs_writer_names_the_systems_reason(tmp_path):
    """torch raises a RuntimeError of its own in place of the system's error."""
    stream = SimpleNamespace(write=full)
    with pytest.raises(ValueError, match="No space left on device"):
        files.write_whole(tmp_path / "a", lambda staging: torch.save({"x": torch.zeros(300_000)}, stream))


def test_a_folder_is_replaced_whole(tmp_path):
    folder = tmp_path / "new" / "thing"
    replace(folder, "old")
    replace(folder, "new")
    assert_whole(folder, "new")
    (folder / "mine").write_text("")
    with pytest.raises(ValueError, match=r"thing holds mine, which is not of a thing; choose another folder"):
        replace(folder, "newer")
    with pytest.raises(ValueError, match=r"is a file; choose a folder"):
        replace(folder / "mine", "newer")


@pytest.mark.parametrize("what", ["fill", "first rename"])
def test_what_a_killed_write_left_goes_before_the_next_one(tmp_path, monkeypatch, what):
    """Not only when the next write ends: that may be killed too."""
    folder = tmp_path / "thing"
    replace(folder, "old")
    with monkeypatch.context() as patch:
        if what == "first rename":
            patch.setattr(Path, "rename", killed)
        with pytest.raises(Killed):
            replace(folder, "new", killed if what == "fill" else None)
    assert names(tmp_path) == ["thing", "thing.partial"]
    files.check_makeable(folder)
    assert_whole(folder, "old")
    files.check_makeable(tmp_path / "not" / "there")
    assert names(tmp_path) == ["thing"]


def test_what_a_killed_process_kept_half_is_removed_a_day_later(tmp_path):
    old = 2 * files.DAY
    for name, age in (("lib.so.abc.partial", old), ("lib.so.def.partial", 0), ("other.so.abc.partial", old)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, times=(time.time() - age,) * 2)
    files.keep(tmp_path / "lib.so", lambda made: made.write_text("x"))
    assert names(tmp_path) == ["lib.so", "lib.so.def.partial", "other.so.abc.partial"]


@pytest.mark.parametrize("what", ["fill", "first rename", "second rename"])
@pytest.mark.parametrize("end", [full, killed])
def test_a_folder_that_cannot_be_written_is_not_lost(tmp_path, monkeypatch, what, end):
    """An error leaves the old folder and nothing else; a kill leaves what the next write puts right."""
    folder, rename, calls = tmp_path / "thing", Path.rename, []
    replace(folder, "old")

    def failing(self, target):
        calls.append(target)
        return end() if len(calls) == (2 if what == "second rename" else 1) else rename(self, target)

    with monkeypatch.context() as patch:
        if what != "fill":
            patch.setattr(Path, "rename", failing)
        with pytest.raises(ValueError if end is full else Killed):
            replace(folder, "new", end if what == "fill" else None)
    if end is full:
        assert_whole(folder, "old")
    with pytest.raises(ValueError, match="No space left"):  # and the next write fails too
        replace(folder, "newer", full)
    assert_whole(folder, "old")
    replace(folder, "newest")
    assert_whole(folder, "newest")


def test_what_several_processes_make_is_made_once(tmp_path, monkeypatch):
    """A file and a folder; another process is faster; what fails leaves nothing."""

    def file(made: Path) -> None:
        assert [path.is_dir() for path in tmp_path.iterdir()] == [True]
        made.write_text("x")

    def folder(made: Path) -> None:
        made.mkdir()
        (made / "part").write_text("y")
        (made.parent / "rest").write_text("z")

    files.keep(tmp_path / "a", file)
    files.keep(tmp_path / "b", folder)
    files.keep(tmp_path / "b", folder)
    assert [path.name for path in sorted(tmp_path.rglob("*"))] == ["a", "b", "part"]
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ValueError, match=r"^cannot write .*/c: No space left on device$"):
        files.keep(tmp_path / "c", folder)
    assert names(tmp_path) == ["a", "b"]


def renames(source: str) -> list[int]:
    """Lines that rename: `os.replace`, `shutil.move`, and `replace` or `rename` of one argument, which is Path's."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            whole = ast.unparse(node.func) in ("os.replace", "os.rename", "shutil.move")
            if whole or (node.func.attr in ("rename", "replace") and len(node.args) == 1 and not node.keywords):
                found.append(node.lineno)
    return found


def test_nobody_else_renames():
    """But what vLLM's process imports, which knows nothing of this project."""
    places = [path for room in ("specdec", "drafters", "trees", "training", "lab", "scripts")
              for path in (ROOT / room).rglob("*.py") if renames(path.read_text(encoding="utf-8"))]  # fmt: skip
    assert places == [ROOT / "specdec" / "cli" / "files.py", ROOT / "training" / "vllm_side" / "hidden_state_files.py"]


def test_results_get_a_folder_of_their_own(tmp_path):
    (tmp_path / "file").write_text("")
    for path in ("/", "/tmp", "/usr/../etc", str(Path.home()), tmp_path / "file"):
        message = r"^cannot write to .*file: File exists$" if path == tmp_path / "file" else "give a folder of its own"
        with pytest.raises(ValueError, match=message):
            files.output_folder(path)


def test_a_cache_that_cannot_be_written_ends_no_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(files, "user_cache_path", lambda name: tmp_path / name)
    (tmp_path / "specdec").write_text("a file, where the folder would be")
    place = files.CachedJson("tuning", {"of": 1})
    place.write({"points": 1})
    assert re.search(
        "^note: cannot write to .*tuning: Not a directory; .* not cached$", capsys.readouterr().err.strip()
    )
    assert place.read(dict) is None
    with pytest.raises(ValueError, match=r"compiled: Not a directory; set XDG_CACHE_HOME to a folder for caches$"):
        files.kept_folder("compiled")


# Lines that are too long to tokenize are refused before they are in memory

LONG = "word " * (MOST_LINE // 5 + 1)
WORDS = "longer than 4 MiB, the most that one line or text may have"


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.xz", "a.json"])
def test_a_record_that_is_too_long_is_a_bad_one(tmp_path, name):
    rows = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "x"}]}
        for text in ("a", LONG, "b")
    ]
    content = json.dumps(rows) if name == "a.json" else "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / name).write_bytes(lzma.compress(content.encode(), preset=0) if "xz" in name else content.encode())
    found, tally = [], Tally("skip")
    for record in read_records(tmp_path / name):
        with tally.record(record.where):
            found.append(record.messages()[0]["content"])
    assert found == ["a", "b"]
    assert tally.counts == {"bad records left out": 1}
    assert re.fullmatch(rf".*{name} (line|row) 2: it is {WORDS}", tally.first_bad)


@pytest.mark.parametrize(
    ("read", "name", "content"),
    [
        (read_prompts, "a.jsonl", f'{{"prompt": "a"}}\n{{"prompt": "{LONG}"}}\n'),
        (read_prompts, "a.json", f'["a", "{LONG}"]'),
        (read_prompts, "a.txt", f"a\n{LONG}\n"),
        (read_records, "a.txt", f"a\n{LONG}\n"),
    ],
)
def test_a_text_that_is_too_long_is_refused(tmp_path, read, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=rf"{name} (line|row) 2 is {WORDS}"):
        list(read(tmp_path / name))


def test_a_line_of_50_mb_is_not_in_memory(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"[" * 50_000_000 + b"\n{}\n" + b"x" * MOST_LINE + b"\n")
    tracemalloc.start()
    with file.open("rb") as lines:
        lengths = [len(line) for line in lines_of(lines)]
    with pytest.raises(ValueError, match=WORDS):
        next(read_records(file)).fields()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert lengths == [MOST_LINE + 1, 3, MOST_LINE + 1]
    assert peak < 6 * MOST_LINE


def test_a_pipe_of_prompts_is_left_to_the_reader(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(checks, "open_text", lambda *_: pytest.fail("it was opened"))
    parse("generate", ["--prompts", str(tmp_path / "pipe"), "--no-draft"])
