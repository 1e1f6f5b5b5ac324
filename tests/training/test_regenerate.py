"""Regeneration, here and by a server: after any interruption the same command continues to the same bytes."""

import json
import shutil

import pytest
from helpers import edit_config, main_of, refused, run_here
from remotes import small_server
from short_runs import contents, small_files
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec import remote
from specdec.engine.engine import Engine
from specdec.model.loader import load_target
from specdec.text import encode_chat
from specdec.training import regenerate as module
from specdec.training.data import Conversation
from specdec.training.data.shards import Shards
from specdec.training.regenerate import Answer, Dialogue, Prompt, plan

main = main_of("data regenerate")


@pytest.fixture(scope="module")
def arguments(target_path, prompts):
    """arguments(folder, more words, questions) -> the words of a run in which neither the number of prompts, that of a
    batch nor that of a shard divides another."""
    sizes = ["--max-new-tokens", "6", "--batch-size", "5", "--shard-size", "9"]

    def words(folder, *more, questions=prompts):
        where = "--target", target_path, "--prompts", questions, "--out", folder / "answers.jsonl"
        return [*map(str, where), *sizes, *more]

    return words


SAMPLED = ("--temperature", "1.0", "--top-p", "0.95", "--seed", "3")


@pytest.fixture(scope="module")
def whole(arguments, tmp_path_factory):
    """What uninterrupted runs write: kind -> {name: bytes}."""
    runs = {}
    for kind, settings in (("greedy", ()), ("sampled", SAMPLED)):
        main(arguments(folder := tmp_path_factory.mktemp(kind), *settings))
        runs[kind] = contents(folder)
    return runs


def test_parts_make_the_files_of_the_whole(arguments, whole, tmp_path, monkeypatch):
    """A part that is there is not made again."""
    for part in ("1/2", "0/2"):
        main(arguments(tmp_path, "--part", part))
    monkeypatch.setattr(module.Engine, "generate", None)
    main(arguments(tmp_path, "--part", "0/2"))
    assert contents(tmp_path) == whole["greedy"]
    said = refused(main, *arguments(tmp_path, "--part", "2/2"))
    assert "--part is K/N, such as 0/4 for the first of 4 parts, and not '2/2'" in said


def test_every_prompt_has_its_answer_in_a_shard(target_path, prompts, whole):
    names = sorted(n for n in whole["greedy"] if n.endswith(".jsonl"))
    assert names == [f"answers-{i:05d}-of-00003.jsonl" for i in range(3)]
    lines = [whole["greedy"][name].decode().splitlines() for name in names]
    assert [len(part) for part in lines] == [9, 9, 5]
    rows = [json.loads(line)["messages"] for part in lines for line in part]
    asked = [json.loads(line)["prompt"] for line in prompts.read_text().splitlines()]
    assert sorted(r[0]["content"] for r in rows) == sorted(asked)
    target = load_target(target_path)
    for question, answer in rows[:3]:
        result = Engine(target).generate([encode_chat(target, [question])], max_new_tokens=6)
        assert answer["content"] == target.tokenizer.decode(result.rows[0].tokens, skip_special_tokens=True)
    assert whole["sampled"] != whole["greedy"]


def test_a_kill_loses_no_line_that_was_written(tmp_path):
    with Shards(tmp_path / "a.jsonl", 9, 4, {}) as shards:
        shards.write([{}] * 6)
        assert (tmp_path / "a-00001-of-00003.jsonl.partial").read_bytes() == b"{}\n" * 2


def test_from_any_byte_on_it_goes_on_to_the_same_bytes(arguments, tmp_path, whole):
    """As if it had been killed at many places, those among them where a line, a batch or a shard just ended."""
    shards = {n: c for n, c in whole["sampled"].items() if n.endswith(".jsonl")}
    text = b"".join(shards[name] for name in sorted(shards))
    ends = [i + 1 for i, byte in enumerate(text) if byte == ord("\n")]
    places = [0, 1, ends[3], ends[4] - 1, ends[4], ends[8] - 1, ends[8], ends[17] + 5, ends[-2], ends[-1] - 1, ends[-1]]
    for place in places:
        folder, left = tmp_path / str(place), place
        folder.mkdir()
        (folder / "answers.run.json").write_bytes(whole["sampled"]["answers.run.json"])
        for name in sorted(shards):
            # A shard that is full may not have got its name yet.
            complete = left > len(shards[name])
            (folder / (name if complete else name + ".partial")).write_bytes(shards[name][:left])
            left -= len(shards[name])
            if left <= 0:
                break
        main(arguments(folder, *SAMPLED))
        assert contents(folder) == whole["sampled"], place


def test_an_answer_that_the_context_cuts_off_is_no_whole_one(target_path, tmp_path, capsys):
    shutil.copytree(target_path, short := tmp_path / "short")
    (questions := tmp_path / "questions.jsonl").write_text(json.dumps({"prompt": "why?"}) + "\n")
    used = len(encode_chat(load_target(target_path), [{"role": "user", "content": "why?"}]))
    edit_config(short, max_position_embeddings=2 * used)
    main(
        [*map(str, ("--target", short, "--prompts", questions, "--max-new-tokens", 999, "--out", tmp_path / "a.jsonl"))]
    )
    answer = json.loads((tmp_path / "a.jsonl").read_text())["messages"][1]
    assert (len(answer["tokens"]), answer["finish_reason"]) == (used, "length")
    assert "answers cut off by --max-new-tokens or the target's context" in capsys.readouterr().err


def test_the_settings_state_the_precision_of_products(arguments, tmp_path, matmul_precision):
    command = arguments(tmp_path, "--limit", "2")
    record = tmp_path / "answers.run.json"
    main(command)
    settings = json.loads(record.read_text())
    assert settings.pop("matmul_precision") == "highest"
    record.write_text(json.dumps(settings))  # of a run before there was this flag
    main(command)
    command += ["--matmul-precision", "medium"]
    assert "begun with matmul_precision highest, and this is medium" in refused(main, *command)
    assert "--matmul-precision contradicts --server" in refused(main, *command, "--server", "http://x")


def test_other_settings_do_not_go_on_with_it(arguments, tmp_path):
    main(arguments(tmp_path, "--limit", "6"))
    before = contents(tmp_path)
    for more, message in (
        (("--limit", "7"), "begun with rows 6, and this is 7"),
        (("--limit", "6", "--temperature", "0.5"), "begun with temperature 0.0, and this is 0.5"),
        (("--limit", "6", "--seed", "1"), "begun with seed 0, and this is 1"),
        (("--limit", "6", "--batch-size", "4"), "begun with batch_size 5, and this is 4"),
    ):
        said = refused(main, *arguments(tmp_path, *more))
        assert message in said
        assert "remove it and answers.run.json" in said
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"prompt": "What else?"}) + "\n")
    refused(main, *arguments(tmp_path, "--limit", "6", "--shard-size", "1", questions=other))
    other.unlink()
    assert contents(tmp_path) == before
    out = tmp_path / "mine.jsonl"
    for path in (out, out.with_name("mine.jsonl.partial")):  # a part of unknown settings is not continued either
        path.write_text("precious\n")
        said = refused(main, *arguments(tmp_path, "--limit", "6", "--out", out))
        assert f"{path.name} exists and was not made by this command" in said
        assert path.read_text() == "precious\n"
        path.unlink()


@pytest.mark.parametrize("room", [700, 1000])
def test_a_full_disk_is_one_sentence_and_nothing_is_lost(arguments, tmp_path, whole, room):
    command = arguments(tmp_path, *SAMPLED)
    with small_files(room):
        refusal = refused(main, *command)
    assert refusal.startswith("error: cannot write ")
    assert "File too large; the lines written so far are complete" in refusal
    text = (tmp_path / "answers-00000-of-00003.jsonl.partial").read_bytes()
    assert len(text) == room
    assert whole["sampled"]["answers-00000-of-00003.jsonl"].startswith(text)
    main(command)
    assert contents(tmp_path) == whole["sampled"]


def test_what_is_not_answered_is_counted(arguments, tmp_path):
    rows = [{"prompt": "One?"}, {"prompt": "x" * 500}, {"messages": [{"role": "assistant", "content": "Hi."}]}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{\n")
    command = arguments(tmp_path, questions=path)
    said = refused(main, *command)
    assert "prompts.jsonl line 4: invalid JSON" in said
    assert "(--bad skip, or data.bad=skip in training, leaves" in said
    done = run_here(main, *command, "--bad", "skip")
    assert "1 prompts of more than 64 tokens left out" in done.stderr
    assert "1 conversations that begin with an answer left out" in done.stderr
    assert "1 bad records left out (the first: " in done.stderr
    assert done.stdout.startswith("1 answers in ")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--samples", "2"), "--samples 2 needs a --temperature"),
        (("--out", "/proc/nowhere/answers.jsonl"), "cannot write /proc/nowhere"),
        (("--served-model-name", "x"), "--served-model-name needs --server"),
        (("--server", "http://x"), "--batch-size contradicts --server"),
    ],
)
def test_mistakes_are_one_sentence(arguments, tmp_path, more, message):
    assert message in refused(main, *arguments(tmp_path, *more))


def test_several_samples_of_a_prompt_differ_and_texts_are_continued(arguments, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("The quick brown\n")
    done = run_here(main, *arguments(tmp_path, "--samples", "4", "--temperature", "1", questions=prompts))
    texts = [json.loads(line)["text"] for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert len(set(texts)) == 4
    assert all(text.startswith("The quick brown") for text in texts)
    assert "are continued as text, without the chat template" in done.stderr


def test_a_text_is_continued_with_the_space_that_a_tokenizer_strips():
    vocab = {"<unk>": 0, "\u2581the": 1, "\u2581end": 2, "s": 3}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    talk = Dialogue(Prompt(tokenizer("the")["input_ids"], Conversation([{"role": "text", "content": "the"}])))
    talk.add(Answer(tokenizer.decode([2, 3]), [2, 3], "length"), None, None)
    assert talk.row(tokenizer) == {"text": "the ends", "tokens": [1, 2, 3], "finish_reason": "length"}


def test_the_plan_depends_on_the_seed_alone_and_holds_every_prompt():
    prompts = [Prompt([1] * (i % 5), []) for i in range(20)]
    assert plan(prompts, 3, 1) == plan(list(prompts), 3, 1) != plan(prompts, 3, 2)
    assert sorted(p.number for batch in plan(prompts, 3, 1) for p in batch) == list(range(20))


# Answers from a server


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
    """Also the text of a server that gives no ids."""
    rows = []
    for ids in (False, True):
        with small_server(engine, ids=ids) as server:
            ask(server, target_path, prompts, out := tmp_path / f"{ids}.jsonl")
        rows.append([json.loads(line)["messages"] for line in out.read_text(encoding="utf-8").splitlines()])
    assert len(rows[1]) == len(server.asked) == 23
    assert all(isinstance(body["prompt"][0], int) for body in server.asked)
    assert all(talk[-1].pop("tokens") for talk in rows[1])
    assert rows[0] == rows[1]
    for question, answer in rows[0][:4]:
        row = engine.generate([encode_chat(engine.target, [question])], max_new_tokens=6).rows[0]
        assert answer["content"] == engine.target.tokenizer.decode(row.tokens, skip_special_tokens=True)
    made_by = json.loads((tmp_path / "True.run.json").read_text())
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
        server.version = "0.2"
        with pytest.raises(SystemExit, match="2"):
            ask(server, target_path, prompts, out, *settings)
    assert "begun with server_version 0.1 of the tests, and this is 0.2" in capsys.readouterr().err
