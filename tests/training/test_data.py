"""Data of the trainer: sources, what is left out and said about it, masks, what a command shows of them."""

import json
import lzma
import shutil
import sys

import pytest
from helpers import main_of, refused, run_here
from omegaconf import OmegaConf
from short_runs import write_rows

from specdec.model.loader import load_target, load_texts
from specdec.training.data import Batches, load_samples, preset, read_conversations, read_records

GOOD = {"messages": [{"role": "user", "content": "What is 1 + 1?"}, {"role": "assistant", "content": "It is 2."}]}
TEXT = {"text": "The quick brown fox."}
FIELDS = {"split": "train", "subset": None, "streaming": False, "max_length": 100, "too_long": "cut", "bad": "error"}


@pytest.fixture
def target(target_path):
    """Loaded again for each test: some change its tokenizer."""
    return load_target(target_path)


def load(target, name, **fields):
    settings = FIELDS | {"path": str(name), "limit": None, "heldout": 0} | fields
    return load_samples(OmegaConf.create(settings), target)


BAD = {
    "invalid JSON: Expecting": b'{"messages": [',
    "invalid JSON: Invalid control character at column": b'{"text": "a\tb"}',
    "not UTF-8 text": b'{"text": "\xff"}',
    "a record must be an object, not list": [1],
    "none of 'conversations'": {"id": 3},
    "the conversation is empty": {"conversations": []},
    "a turn is not an object": {"conversations": ["hello"]},
    "a turn by 'narrator'; known are human": {"conversations": [{"from": "narrator", "value": "x"}]},
    "a turn by null": {"messages": [{"content": "x"}]},
    "function_call must be a text": {
        "conversations": [{"from": "function_call", "value": [{"type": "text", "text": "{}"}] * 2}]
    },
    "a turn by 'assistant' has neither": {"messages": [GOOD["messages"][0], {"role": "assistant", "content": None}]},
    "a content part of type 'image' is not supported": {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
}


@pytest.mark.parametrize("message", BAD)
def test_a_bad_record_is_named_by_its_line_or_skipped_and_counted(target, tmp_path, capsys, message):
    path = write_rows(tmp_path / "a.jsonl", GOOD, b"", GOOD, BAD[message], GOOD)
    with pytest.raises(ValueError, match=r"a.jsonl line 4: .*" + message):
        load(target, path)
    assert len(load(target, path, bad="skip")) == 3
    printed = capsys.readouterr().err
    assert "1 bad records left out" in printed
    assert "a.jsonl line 4: " in printed
    assert message in printed


def test_long_conversations_are_cut_or_dropped_and_counted(target, tmp_path, capsys):
    longer = {"messages": [GOOD["messages"][0], {"role": "assistant", "content": "It is 2. " * 20}]}
    path = write_rows(tmp_path / "a.jsonl", GOOD, longer, GOOD)
    lengths = [[len(s.ids) for s in load(target, path, max_length=40, too_long=how)] for how in ("cut", "drop")]
    short = lengths[0][0]
    assert lengths == [[short, 40, short], [short, short]]
    printed = capsys.readouterr().err
    assert "1 conversations cut at 40 tokens" in printed
    assert "1 conversations of more than 40 tokens left out" in printed
    for name, choices, value in ("too_long", "'cut' or 'drop'", "fold"), ("bad", "'error' or 'skip'", "ignore"):
        with pytest.raises(ValueError, match=f"{name} must be {choices}, got '{value}'"):
            load(target, path, **{name: value})


def test_what_has_nothing_to_learn_is_left_out_and_counted(target, tmp_path, capsys):
    refusing = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}"
    target.tokenizer.chat_template = refusing + target.tokenizer.chat_template
    answer_first = {"messages": [{"role": "assistant", "content": "Hello."}]}
    path = write_rows(tmp_path / "a.jsonl", GOOD, answer_first, {"prompt": "And?"}, TEXT)
    assert len(load(target, path)) == 2
    printed = capsys.readouterr().err
    assert "1 conversations that the chat template refuses left out" in printed
    assert "1 conversations in which the assistant does not speak left out" in printed
    with pytest.raises(ValueError, match=r"no conversation in which the assistant speaks.*specdec data regenerate"):
        load(target, write_rows(tmp_path / "b.jsonl", {"turns": ["One?", "Two?"]}))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "a.jsonl is empty"),
        ("a.json", b" ", "a.json is empty"),
        ("a.json", b"[]", "a.json is empty"),
        ("a.json", b'{"messages": []}', "must hold a list of conversations"),
        ("a.json", b'[\n{"text": "a"},\n{]', r"a.json is not valid JSON: .* line 3"),
        ("a.json", b'{"text": "a"}\n{"text": "b"}', "Extra data.*; for one object a line the name must end in .jsonl"),
        ("a.jsonl.xz", lzma.compress(b"{}")[:-9], "a.jsonl.xz is damaged"),
        ("a.csv", b"a,b", r"a.csv is of no known form: the name must end in .json, .jsonl, .jsonl.xz, .txt or "),
    ],
)
@pytest.mark.parametrize("bad", ["error", "skip"])
def test_a_file_that_cannot_be_read_is_an_error_whatever_is_skipped(target, tmp_path, name, content, message, bad):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load(target, tmp_path / name, bad=bad)


def test_a_template_that_cannot_be_masked_is_a_fault_of_the_record(target, tmp_path, capsys):
    """It numbers turns from the end, so a conversation of two turns has no exact offsets, but one turn would do."""
    target.tokenizer.chat_template = "{% for m in messages %}{{ loop.revindex }}{{ m.content }}{% endfor %}"
    path = write_rows(tmp_path / "a.jsonl", TEXT, GOOD)
    with pytest.raises(ValueError, match=r"line 2: the chat template rewrites earlier text at each turn.*generation"):
        load(target, path)
    assert len(load(target, path, bad="skip")) == 1
    assert "line 2: the chat template rewrites" in capsys.readouterr().err


@pytest.mark.parametrize("bad", ["error", "skip"])
def test_a_tokenizer_that_is_not_the_targets_is_an_error_whatever_is_skipped(target, tmp_path, bad):
    path = write_rows(tmp_path / "a.jsonl", GOOD)
    template = target.tokenizer.chat_template
    target.tokenizer.chat_template = template.replace("<|end|>", "<|im_end|>")
    with pytest.raises(ValueError, match=r"writes <\|im_end\|>, which the tokenizer does not hold as one token"):
        load(target, path, bad=bad)
    target.tokenizer.chat_template = None
    with pytest.raises(ValueError, match="has no chat template"):
        load(target, path, bad=bad)
    assert len(load(target, write_rows(tmp_path / "text.jsonl", TEXT), bad=bad)) == 1, "plain texts need none"
    target.tokenizer.chat_template = template
    target.tokenizer.add_tokens([f"word{i}" for i in range(9)])
    path = write_rows(tmp_path / "b.jsonl", GOOD, {"text": "word8"})
    with pytest.raises(ValueError, match=r"b.jsonl line 2: the tokenizer gives token \d+, but the target's vocabulary"):
        load(target, path, bad=bad)


def test_half_a_surrogate_pair_is_no_obstacle(target, tmp_path):
    (sample,) = load(target, write_rows(tmp_path / "a.jsonl", b'{"text": "a \\ud800 b"}'))
    assert target.tokenizer.decode(sample.ids) == "a ??? b".replace("?", "\N{REPLACEMENT CHARACTER}")


def test_a_pattern_reads_files_in_order_of_their_names(tmp_path):
    for name in ("2", "1", "3"):
        write_rows(tmp_path / f"answers-{name}.jsonl", {"text": name})
    assert [c[0]["content"] for c in read_conversations(tmp_path / "answers-*.jsonl")] == ["1", "2", "3"]
    with pytest.raises(ValueError, match="no such data file"):
        list(read_conversations(tmp_path / "questions-*.jsonl"))


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The library `datasets` with its caches in a folder of the test, and not allowed to ask the hub."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
    return datasets


ROWS = [{"conversations": [{"from": "human", "value": f"{i}?"}, {"from": "gpt", "value": f"{i}!"}]} for i in range(5)]


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.jsonl.xz"])
def test_sharegpt_and_openai_forms(tmp_path, name):
    openai = [{"role": "user", "content": "a\u2028b"}, {"role": "assistant", "content": "c"}]
    sharegpt = [{"from": "human", "value": "a\u2028b"}, {"from": "gpt", "value": "c"}]
    rows = [{"conversations": sharegpt}, {"messages": openai}]
    text = json.dumps(rows) if name == "a.json" else "\n".join(json.dumps(r, ensure_ascii=False) for r in rows)
    (lzma.open if name.endswith("xz") else open)(tmp_path / name, "wt", encoding="utf-8").write(text)
    assert [*read_conversations(tmp_path / name)] == [openai, openai]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("form", ["file.parquet", "folder of parquet", "folder of json", "saved", "saved dictionary"])
def test_data_sets_are_read_as_files_are(hub, tmp_path, target, form, streaming):
    rows, path = hub.Dataset.from_list(ROWS), tmp_path / "mine"
    path.mkdir()
    if "parquet" in form:
        rows.to_parquet(path / "train-00000-of-00001.parquet")
    elif form == "folder of json":
        write_rows(path / "train.jsonl", *ROWS)
    else:
        (rows if form == "saved" else hub.DatasetDict(train=rows)).save_to_disk(path)
    path = path / "train-00000-of-00001.parquet" if form == "file.parquet" else path
    plain = [r.messages() for r in read_records(write_rows(tmp_path / "plain.jsonl", *ROWS))]
    assert [r.messages() for r in read_records(path, streaming=streaming)] == plain
    a, b = load(target, path, streaming=streaming), load(target, tmp_path / "plain.jsonl")
    assert [s.ids.tolist() for s in a] == [s.ids.tolist() for s in b]


def test_a_stream_is_read_no_further_than_needed_and_gives_the_same_batches_again(hub, tmp_path, target):
    hub.Dataset.from_list([*ROWS, {"conversations": []}]).to_parquet(tmp_path / "mine.parquet")
    first, again = (load(target, tmp_path / "mine.parquet", streaming=True, limit=4) for _ in range(2))
    assert len(first) == 4
    with pytest.raises(ValueError, match=r"mine.parquet \(train\) row 6: the conversation is empty"):
        load(target, tmp_path / "mine.parquet", streaming=True)
    run = Batches(first, 32, 0).iterate()
    whole = [next(run).tokens.tolist() for _ in range(7)]
    resumed = Batches(again, 32, 0).iterate(skip=5)
    assert [next(resumed).tokens.tolist() for _ in range(2)] == whole[5:]


def test_a_data_set_that_is_not_there_is_one_sentence(hub, tmp_path, monkeypatch):
    """Also where the library `datasets` is not installed."""
    with pytest.raises(ValueError, match="cannot read the data set someone/nothing"):
        list(read_records("someone/nothing"))
    hub.DatasetDict(test=hub.Dataset.from_list(ROWS)).save_to_disk(tmp_path / "mine")
    with pytest.raises(ValueError, match=r"cannot read the data set .*mine: 'train'"):
        list(read_records(tmp_path / "mine"))
    assert len(list(read_records(tmp_path / "mine", split="test"))) == 5
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install 'specdec\[data\]'"):
        list(read_records("HuggingFaceH4/ultrachat_200k"))


def test_presets_name_data_sets():
    assert preset("ultrachat") == {"name": "HuggingFaceH4/ultrachat_200k", "split": "train_sft"}
    for name, of in (("mt_bench", "HuggingFaceH4/mt_bench_prompts"), ("mine.jsonl",) * 2, ("files",) * 2):
        assert preset(name) == {"name": of}


def test_a_number_or_mapping_as_path_is_read_as_a_name(target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "5").touch()
    for path, message in ((5, "5 is of no known form"), ({"a": 1}, "no such data file: {'a': 1}")):
        with pytest.raises(ValueError, match=message):
            load(target, "", path=path)


def test_the_limit_counts_what_is_kept_and_nothing_is_read_beyond_it(target, tmp_path):
    path = write_rows(tmp_path / "a.jsonl", {"prompt": "?"}, GOOD, GOOD, b"broken")
    assert len(load(target, path, limit=2)) == 2


def test_show_and_count_read_no_weights(target_path, tmp_path):
    folder, whole = tmp_path / "target", load_target(target_path)
    shutil.copytree(target_path, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    texts = load_texts(folder)
    assert (texts.vocab, texts.eos, texts.config.context) == (whole.vocab, whole.eos, whole.config.context)
    data = write_rows(tmp_path / "a.jsonl", {"prompt": "No answer?"}, GOOD)
    words = ["--target", str(folder), "--data", str(data)]
    for command, *more in (("data show",), ("data count", "--size", "9", "--out", str(tmp_path / "map.json"))):
        said = run_here(main_of(command), *words, *more).stderr
        assert said == "data: 1 conversations in which the assistant does not speak left out\n"
    assert len(json.loads((tmp_path / "map.json").read_text())) == 9


def test_show_marks_what_is_learnt(target_path, tmp_path, monkeypatch):
    path = write_rows(tmp_path / "a.jsonl", {"prompt": "No answer?"}, GOOD)
    show, words = main_of("data show"), ["--target", str(target_path), "--data", str(path)]
    out = run_here(show, *words).stdout
    assert out.startswith("<|user|>What is 1 + 1?<|end|><|assistant|>⟦It is 2.<|end|>⟧\n")
    assert "are training tokens" in out
    assert "\x1b" not in out
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = run_here(show, *words).stdout
    assert "⟦" not in out
    assert out.split("\x1b[")[1].endswith("It is 2.<|end|>"), "the first colour begins where the assistant does"
    assert "no conversation in which the assistant speaks beyond the first 1" in refused(show, *words, "--skip", "1")
