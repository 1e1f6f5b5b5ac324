"""Lines that are too long to tokenize are refused before they are in memory."""

import json
import lzma
import re
import tracemalloc

import pytest

from specdec.cli.reading import MOST_LINE, lines_of
from specdec.text import read_prompts
from specdec.training.data import Tally, read_records

LONG = "word " * (MOST_LINE // 5 + 1)
WORDS = "longer than 4 MiB, the most that one line or text may have"


def conversation(text: str) -> dict:
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "x"}]}


def as_lines(*texts: str) -> bytes:
    return "".join(json.dumps(conversation(text)) + "\n" for text in texts).encode()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", as_lines("a", LONG, "b")),
        ("a.jsonl.xz", lzma.compress(as_lines("a", LONG, "b"), preset=0)),
        ("a.json", json.dumps([conversation(text) for text in ("a", LONG, "b")]).encode()),
    ],
)
def test_a_record_that_is_too_long_is_a_bad_one(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    found, tally = [], Tally("skip")
    for record in read_records(tmp_path / name):
        with tally.record(record.where):
            found.append(record.messages()[0]["content"])
    assert found == ["a", "b"]
    assert tally.counts == {"bad records left out": 1}
    assert re.fullmatch(rf".*{name} (line|row) 2: it is {WORDS}", tally.first_bad)


def test_a_text_that_is_too_long_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text(f"a\n{LONG}\n")
    with pytest.raises(ValueError, match=f"a.txt line 2 is {WORDS}"):
        list(read_records(tmp_path / "a.txt"))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", f'{{"prompt": "a"}}\n{{"prompt": "{LONG}"}}\n'),
        ("a.json", f'["a", "{LONG}"]'),
        ("a.txt", f"a\n{LONG}\n"),
    ],
)
def test_a_prompt_that_is_too_long_is_refused(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=rf"{name} (line|row) 2 is {WORDS}"):
        read_prompts(tmp_path / name)


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
