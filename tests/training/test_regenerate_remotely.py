"""Answers from a server: the target's own, in any order of arrival, and the same bytes after an interruption."""

import json

import pytest
from remotes import small_server
from short_runs import contents

from specdec import remote
from specdec.engine.engine import Engine
from specdec.model.loader import load_target
from specdec.text import encode_chat
from specdec.training.regenerate import main

COUNT = 23  # of `prompts`


@pytest.fixture(scope="module")
def engine(target_path):
    return Engine(load_target(target_path))


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(remote, "PAUSE", 0.001)


def ask(server, target_path, prompts, out, *more) -> None:
    where = ["--server", server.url, "--model", "small", "--target", str(target_path)]
    main([*where, "--prompts", str(prompts), "--out", str(out), "--max-new-tokens", "6", "--requests", "4", *more])


def test_the_answers_are_the_targets_own(engine, target_path, prompts, tmp_path):
    with small_server(engine) as server:
        ask(server, target_path, prompts, tmp_path / "answers.jsonl")
    rows = [json.loads(line)["messages"] for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert len(rows) == len(server.asked) == COUNT
    assert all(isinstance(body["prompt"][0], int) for body in server.asked)
    for question, answer in rows[:4]:
        row = engine.generate([encode_chat(engine.target, [question])], max_new_tokens=6).rows[0]
        assert answer["content"] == engine.target.tokenizer.decode(row.tokens, skip_special_tokens=True)
    made_by = json.loads((tmp_path / "answers.run.json").read_text())
    assert (made_by["server_model"], made_by["server_version"]) == ("small", "0.1 of the tests")
    assert (made_by["temperature"], made_by["top_p"], made_by["max_new_tokens"]) == (0.0, 1.0, 6)


def test_after_failures_and_an_interruption_the_bytes_are_the_same(engine, target_path, prompts, tmp_path, capsys):
    for folder in ("whole", "cut"):
        (tmp_path / folder).mkdir()
    settings = ("--shard-size", "5", "--limit", "13", "--temperature", "1.0", "--seed", "3")
    with small_server(engine) as server:
        ask(server, target_path, prompts, tmp_path / "whole" / "answers.jsonl", *settings)
    whole, out = contents(tmp_path / "whole"), tmp_path / "cut" / "answers.jsonl"
    failing = small_server(engine, fail=lambda number: 400 if number > 8 else None)
    with failing as server, pytest.raises(SystemExit, match="2"):
        ask(server, target_path, prompts, out, *settings)
    assert "answers 400: not now" in capsys.readouterr().err
    left = b"".join(data for name, data in sorted(contents(out.parent).items()) if "jsonl" in name)
    assert 0 < left.count(b"\n") <= 9
    (out.parent / "answers-00001-of-00003.jsonl.partial").open("ab").write(b'{"messages"')  # a kill within a line
    with small_server(engine, fail=lambda number: 503 if number % 3 == 0 else None) as server:
        ask(server, target_path, prompts, out, *settings)
    assert contents(out.parent) == whole


def test_another_version_does_not_go_on_with_it(engine, target_path, prompts, tmp_path, capsys):
    out = tmp_path / "answers.jsonl"
    with small_server(engine) as server:
        ask(server, target_path, prompts, out)
        server.version = "0.2"
        with pytest.raises(SystemExit, match="2"):
            ask(server, target_path, prompts, out)
    assert "begun with server_version 0.1 of the tests, and this is 0.2" in capsys.readouterr().err


def test_a_server_without_ids_gives_its_text(engine, target_path, prompts, tmp_path):
    with small_server(engine) as server:
        ask(server, target_path, prompts, tmp_path / "ids.jsonl")
    with small_server(engine, ids=False) as server:
        ask(server, target_path, prompts, tmp_path / "text.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "ids.jsonl").read_text(encoding="utf-8").splitlines()]
    assert all(row["messages"][-1].pop("tokens") for row in rows)
    assert rows == [json.loads(line) for line in (tmp_path / "text.jsonl").read_text(encoding="utf-8").splitlines()]


def test_mistakes_are_one_sentence(target_path, prompts, tmp_path, capsys):
    for flags, message in (
        (["--model", "x"], "--model names a model of --server"),
        (["--server", "http://x", "--requests", "0"], "--requests must be at least 1"),
        (["--server", "nowhere"], "begins with http:// or https://"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["--target", str(target_path), "--prompts", str(prompts), "--out", str(tmp_path / "o.jsonl"), *flags])
        assert message in capsys.readouterr().err
