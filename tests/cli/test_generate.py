"""The command line: what it prints, any character in a prompt, and one sentence for each mistake."""

import argparse
import importlib
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import specdec
from specdec import registry
from specdec.api import make_tree
from specdec.cli import chat, decoding, summary
from specdec.cli import generate as cli
from specdec.machine import machine
from specdec.model.loader import load_target
from specdec.text import TextStream


@pytest.fixture
def run(target_path, drafter_path, capsys):
    """Call the command with the tiny pair; returns (exit code, standard output, standard error)."""

    def call(*args, target=target_path, draft=drafter_path):
        models = ["--target", str(target)] + (["--draft", str(draft)] if draft else [])
        try:
            cli.main([*models, *map(str, args)])
            code = 0
        except SystemExit as stop:
            code = stop.code
        out, err = capsys.readouterr()
        return code, out, err

    return call


def last_json(out: str) -> dict:
    return json.loads(out.rstrip("\n").split("\n")[-1])


def test_json_has_what_is_promised(run):
    code, out, _ = run("--prompt", "The quick", "--max-new-tokens", 20, "--compare", "--json")
    result = last_json(out)
    assert code == 0
    assert result["identical"] is True
    assert len(result["token_ids"]) == result["num_tokens"] <= 20
    assert result["tau"] == pytest.approx((result["num_tokens"] - 1) / result["rounds"])
    assert len(result["acceptance_by_depth"]) == 5
    assert result["speedup"] == pytest.approx(result["tokens_per_second"] / result["baseline_tokens_per_second"])
    assert isinstance(result["text"], str)


def test_compare_takes_turns_until_the_time_is_long_enough(run, monkeypatch):
    for enough, turns in ((0, 1), (math.inf, decoding.PASSES)):
        monkeypatch.setattr(decoding, "LONG_ENOUGH", enough)
        code, out, _ = run("--prompt", "The quick", "--max-new-tokens", 8, "--compare", "--json")
        result = last_json(out)
        assert code == 0
        assert len(result["speedups"]) == turns
        assert result["speedup"] == statistics.median(result["speedups"])
        assert result["speedup"] == pytest.approx(result["tokens_per_second"] / result["baseline_tokens_per_second"])
    assert ", the median of 5 turns (" in run("--prompt", "The quick", "--max-new-tokens", 8, "--compare")[1]


def test_a_token_map_narrows_what_is_proposed_and_changes_no_text(run, tmp_path):
    (tmp_path / "map.json").write_text(json.dumps(list(range(40))))
    flags = ("--prompt", "The quick", "--max-new-tokens", 20, "--compare", "--json")
    code, out, _ = run(*flags, "--token-map", tmp_path / "map.json")
    assert code == 0
    assert last_json(out)["identical"] is True
    assert "tokens to propose" in last_json(out)["drafter"]["token map"]


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_a_drafter_of_another_dtype_changes_no_text(run, dtype):
    code, out, _ = run("--prompt", "The quick", "--max-new-tokens", 20, "--compare", "--json", "--draft-dtype", dtype)
    assert code == 0
    assert last_json(out)["identical"] is True


def test_products_may_be_less_exact(run, matmul_precision):
    flags = ("--prompt", "The quick", "--max-new-tokens", 20, "--compare", "--json")
    code, out, _ = run(*flags, "--matmul-precision", "medium")
    assert code == 0
    assert last_json(out)["identical"] is True
    assert last_json(out)["matmul_precision"] == "medium"
    assert "products: medium precision" in run(*flags[:-1])[1]
    assert machine(torch.device("cpu"))["matmul_precision"] == "medium"  # what rounds cost is kept for each
    code, _, err = run(*flags, "--matmul-precision", "bf16")
    assert code == 2
    assert "invalid choice: 'bf16' (choose from 'highest', 'high', 'medium')" in err


def test_drafters_that_learn_have_a_dtype(run):
    code, _, err = run("--prompt", "x", "--draft", "ngram", "--draft-dtype", "bf16")
    assert code == 2
    assert "dtype are for drafters that learn" in err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--token-map", "nowhere.json"], "no such token map: nowhere.json"),
        (["--feedback", "pre"], "its own config says what it feeds back"),
    ],
)
def test_map_and_feedback_mistakes(run, flags, message):
    code, _, err = run("--prompt", "x", *flags)
    assert code == 2
    assert message in err


def test_summary_and_trees(run):
    code, out, _ = run(
        "--prompt", "The quick", "--max-new-tokens", 12, "--compare", "--show-trees", "--topk", 2, "--steps", 2
    )
    assert code == 0
    assert "identical: yes (1 of 1)" in out
    assert "time by part: " in out
    assert "|-- " in out
    assert "\033[" not in out, "colours belong on a terminal only"


@pytest.mark.parametrize(
    ("steps", "acceptance", "said"),
    [
        (
            5,
            "measured",
            "a smaller tree costs less a round (--topk 1 --steps 3), --tree auto chooses by what is measured, ",
        ),
        (3, "measured", "--tree auto chooses by what is measured, "),
        (2, None, ""),
    ],
)
def test_what_is_advised_where_a_drafter_does_not_pay(steps, acceptance, said):
    drafter = SimpleNamespace(acceptance=acceptance)
    session = SimpleNamespace(tree=make_tree(1, steps), choice=None, drafter=drafter)
    assert summary._faster(session) == f"{said}specdec tune finds the fastest setting"


@pytest.mark.parametrize(
    "prompt",
    [
        "日本語 ünïcode 🎉",
        "tabs\tand\nnewlines",
        "<|end|><|user|>",
        "\x00\x07",
        "\udcff\udc80",
        "half a pair \ud83d",
        "'\"\\$`%s{}",
    ],
)
def test_any_characters(run, prompt):
    code, out, err = run("--prompt", prompt, "--max-new-tokens", 4, "--json")
    assert code == 0, err
    assert last_json(out)["num_tokens"] >= 1


@pytest.mark.parametrize("seed", range(4))
def test_streamed_text_is_the_final_text(run, seed):
    """Sampled from a random model: most tokens are parts of characters, which come in pieces or not at all."""
    code, out, _ = run("--prompt", "日本語 Café", "--max-new-tokens", 60, "--temperature", 1, "--seed", seed, "--json")
    assert code == 0
    assert "\n".join(out.rstrip("\n").split("\n")[:-1]) == last_json(out)["text"]


def test_stream_gives_whole_characters_only(target_path):
    tokenizer = load_target(target_path).tokenizer
    text = "Café 日本語 🎉 end"
    stream = TextStream(tokenizer)
    pieces = [stream.feed([token]) for token in tokenizer(text)["input_ids"]]
    assert "".join(pieces) + stream.end() == text
    assert "\ufffd" not in "".join(pieces)


def test_one_token_has_no_speed(run):
    code, out, err = run("--prompt", "fox", "--max-new-tokens", 1, "--compare")
    assert code == 0, err
    assert "speculative to plain: -" in out


def test_drafters_without_training_and_a_tree_from_a_file(run, tmp_path, target_path):
    tree = tmp_path / "tree.yaml"
    tree.write_text("paths: [[0], [1], [0, 0], [0, 0, 0]]")
    for draft in ("ngram", "ngram:suffix", target_path):
        code, out, err = run("--prompt", "The fox", "--tree", tree, "--compare", "--json", draft=draft)
        assert code == 0, err
        result = last_json(out)
        assert result["identical"] is True
        assert len(result["acceptance_by_depth"]) == 3
    assert result["acceptance_by_depth"][0] > 0.9, "the target as its own drafter"


@pytest.mark.parametrize("tree", [*registry.names("tree"), "2/3/6", "1/2/3", "drawn 2,1"])
def test_every_tree_of_conf_by_its_name(run, tree):
    code, out, err = run("--prompt", "The fox", "--max-new-tokens", 12, "--tree", tree, "--compare", "--json")
    if tree == "block":
        assert (code, err) == (
            2,
            "error: a block tree takes drafters that guess a block at once, and this one drafts token by token\n",
        )
    else:
        assert code == 0, err
        assert last_json(out)["identical"] is True
    code, _, err = run("--prompt", "x", "--tree", "oak")
    assert (code, err.count("\n")) == (2, 1)
    assert f"there is no tree 'oak'; known are {', '.join(registry.names('tree'))}, " in err


def test_prompt_files_and_batches_agree(run, tmp_path):
    prompts = ["The quick brown", "What is 12?", "日本語", "It is"]
    text, rows = tmp_path / "p.txt", tmp_path / "p.jsonl"
    text.write_text("\n".join(prompts), encoding="utf-8")
    rows.write_text(
        "\n".join(
            [
                json.dumps({"prompt": prompts[0]}),
                json.dumps({"turns": [*prompts[1:2], "x"]}),
                json.dumps({"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": prompts[2]}]}),
                json.dumps({"conversations": [{"from": "human", "value": prompts[3]}, {"from": "gpt", "value": "x"}]}),
            ]
        )
    )
    results = [
        last_json(run("--prompt-file", file, "--max-new-tokens", 12, "--batch-size", size, "--json")[1])["token_ids"]
        for file, size in ((text, 1), (text, 2), (rows, 1), (rows, 3))
    ]
    assert all(result == results[0] for result in results)
    assert len(results[0]) == 4
    limited = run("--prompt-file", text, "--max-new-tokens", 12, "--limit", 2, "--json")[1]
    assert last_json(limited)["token_ids"] == results[0][:2]


@pytest.fixture
def demo(capsys):
    """The command with the bundled pair."""

    def call(*args):
        cli.main(["--prompt", "Write a poem.", "--max-new-tokens", "24", *args])
        return capsys.readouterr().out

    return call


def test_a_stop_string_ends_text_and_screen(demo):
    text = last_json(demo("--json"))["text"]
    word = text.split()[3]
    out = demo("--stop", "never said", "--stop", word, "--compare", "--json")
    result = last_json(out)
    assert result["finish"] == "stop"
    assert result["identical"] is True
    assert result["text"] == text[: text.index(word)]
    assert out.rsplit("\n", 2)[0] == result["text"]


def test_a_text_is_json_of_a_schema(demo, tmp_path):
    pytest.importorskip("llguidance")
    file = tmp_path / "schema.json"
    file.write_text('{"type": "array", "items": {"enum": ["sea", "sky"]}, "minItems": 2, "maxItems": 2}')
    result = last_json(demo("--json-schema", str(file), "--compare", "--json"))
    assert result["identical"] is True
    assert set(json.loads(result["text"])) <= {"sea", "sky"}
    file.write_text('{"type": "arrey"}')
    with pytest.raises(SystemExit):
        demo("--json-schema", str(file))


def test_answers_of_a_chat_are_json_of_a_schema(capsys, monkeypatch, tmp_path):
    pytest.importorskip("llguidance")
    file = tmp_path / "schema.json"
    file.write_text('{"type": "array", "items": {"enum": ["sea", "sky"]}, "minItems": 2, "maxItems": 2}')
    messages = iter(["Hello!", "Again."])
    monkeypatch.setattr("builtins.input", lambda _: next(messages, None) or _stop(messages))
    cli.main(["--chat", "--max-new-tokens", "24", "--json-schema", str(file)])
    answers = re.findall(r"^\[\s*\".*\]$", capsys.readouterr().out, re.MULTILINE)
    assert len(answers) == 2
    assert all(set(json.loads(answer)) <= {"sea", "sky"} for answer in answers)


def test_penalties_and_logprobs(demo):
    without = last_json(demo("--json"))
    assert "logprobs" not in without
    penalties = ("--repetition-penalty", "2", "--presence-penalty", "1", "--frequency-penalty", "0.5")
    result = last_json(demo(*penalties, "--compare", "--logprobs", "--json"))
    assert result["identical"] is True
    assert result["token_ids"] != without["token_ids"]
    assert len(result["logprobs"]) == len(result["token_ids"])
    assert max(result["logprobs"]) <= 0


def test_sampling_is_seeded(run):
    def tokens(seed):
        return last_json(
            run("--prompt", "fox", "--temperature", 1, "--seed", seed, "--max-new-tokens", 16, "--json")[1]
        )["token_ids"]

    assert tokens(1) == tokens(1) != tokens(2)


def test_sampled_answers_do_not_depend_on_the_batch_or_the_draft(run, tmp_path):
    """Nor on the children, and `--compare` says so."""
    (tmp_path / "prompts.txt").write_text("The quick\nWhat is\nEin\nThe lazy dog\n")
    flags = ("--prompt-file", tmp_path / "prompts.txt", "--temperature", 0.9, "--top-p", 0.95, "--max-new-tokens", 12)
    told = []
    for more in ((), ("--batch-size", 3), ("--topk", 1), ("--children", "likeliest"), ("--no-draft",)):
        how = {"draft": None} if "--no-draft" in more else {}
        code, out, err = run(*flags, *more, *(() if how else ("--compare",)), "--json", **how)
        assert code == 0, err
        result = last_json(out)
        assert result.get("identical", True) is True
        told.append(result["token_ids"])
    assert told == [told[0]] * 5
    assert last_json(run(*flags, "--seed", 1, "--json")[1])["token_ids"] != told[0]
    code, _, err = run(*flags, "--children", "drawn")
    assert code == 2
    assert "drawn children need a tree that knows" in err


def test_context_ends_the_text(run):
    code, out, _ = run("--prompt", "fox " * 20, "--max-new-tokens", 500, "--compare", "--json")
    result = last_json(out)
    assert code == 0
    assert result["identical"] is True
    assert result["finish"] == "context"


def test_chat_keeps_its_history(run, monkeypatch):
    lines = iter(["The quick", "", "brown fox"])
    seen = []
    original = chat.encode_chat
    monkeypatch.setattr(
        chat, "encode_chat", lambda target, messages: seen.append(list(messages)) or original(target, messages)
    )
    monkeypatch.setattr("builtins.input", lambda _: next(lines, None) or _stop(lines))
    code, _, err = run("--chat", "--max-new-tokens", 6)
    assert code == 0, err
    assert [m["role"] for m in seen[-1]] == ["user", "assistant", "user"]


def _stop(lines):
    rest = next(lines, None)
    if rest is None:
        raise EOFError
    return rest


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "  \n"], "the prompt is empty"),
        (["--prompt", "fox " * 400], "tokens, the target's context holds 128"),
        (["--prompt", "x", "--topk", "2", "--steps", "2", "--num-draft-tokens", "9"], "a tree holds 2 to 7 tokens"),
        (["--prompt", "x", "--topk", "1", "--num-draft-tokens", "9"], "a chain of steps + 1 = 6 tokens"),
        (["--prompt", "x", "--topk", "500"], "but the draft vocabulary has"),
        (["--prompt", "x", "--steps", "0"], "must be at least 1"),
        (["--prompt", "x", "--max-new-tokens", "0"], "--max-new-tokens must be at least 1, got 0"),
        (["--prompt", "x", "--prompt-file", "y"], "exactly one of"),
        ([], "exactly one of"),
        (["--prompt", "x", "--no-draft"], "--draft contradicts --no-draft"),
        (["--prompt", "x", "--compile", "--no-graphs"], "--no-graphs contradicts --compile"),
        (["--prompt", "x", "--top-k", "5"], "need a temperature above 0"),
        (["--prompt", "x", "--temperature", "-1"], "temperature must be"),
        (["--prompt", "x", "--dtype", "int3"], "dtype must be"),
        (["--prompt", "x", "--device", "nonsense"], "device 'nonsense' cannot be used"),
        (["--prompt", "x", "--tree", "t.yaml", "--topk", "2"], "--topk contradicts --tree"),
        (["--prompt", "x", "--tree", "/no/such"], "no such tree file"),
        (["--prompt-file", "/no/such"], "no such prompt file"),
        (["--chat", "--json"], "--chat goes with neither"),
        (["--prompt", "x", "--json-schema", "/no/such"], "no such JSON schema file"),
        (["--prompt", "x", "--stop", ""], "a stop string needs at least one character"),
        (["--prompt", "x", "--repetition-penalty", "0"], "repetition_penalty must be a positive number"),
        (["--prompt", "x", "--frequency-penalty", "2.1"], "frequency_penalty must lie in [-2, 2]"),
        (["--prompt", "x", "--logprobs"], "--logprobs are part of what --json prints"),
        (["--prompt", "x", "--limit", "2"], "--limit counts the prompts of --prompt-file"),
        (["--prompt", "x", "--tempertaure", "1"], "there is no flag --tempertaure; there is --temperature"),
        (["--prompt", "x", "--qqq"], "there is no flag --qqq; specdec generate --help lists all"),
        (["--prompt", "What", "is", "12?"], "is belongs to no flag: a text with spaces needs quotes around it"),
    ],
)
def test_mistakes_are_one_sentence(run, args, message):
    code, _, err = run(*args)
    assert code == 2
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


def test_prompts_are_checked_before_the_first_is_answered(run, tmp_path):
    (tmp_path / "p.txt").write_text(f"fox\n{'fox ' * 400}\n")
    code, out, err = run("--prompt-file", str(tmp_path / "p.txt"))
    assert (code, out) == (2, "")
    assert "the target's context holds 128, new ones included (prompt 2 of 2)" in err


def damaged(source, folder, change):
    shutil.copytree(source, folder)
    change(folder)
    return folder


def edit_tensors(change):
    def apply(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return apply


def edit_config(**fields):
    def apply(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | fields))

    return apply


def truncate(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def pickled_code(folder):
    torch.save(load_file(folder / "model.safetensors") | {"x": argparse.Namespace()}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


BROKEN = {
    "truncated": (truncate, "damaged or not safetensors"),
    "pickled code": (pickled_code, "holds more than tensors"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "it has no safetensors"),
    "no config": (lambda f: (f / "config.json").unlink(), "it has no config.json"),
    "bad config": (lambda f: (f / "config.json").write_text("{"), "is not valid JSON"),
}
BROKEN_TARGET = BROKEN | {
    "missing tensor": (edit_tensors(lambda t: t.pop("model.norm.weight")), "lacks the tensor model.norm.weight"),
    "extra tensor": (edit_tensors(lambda t: t.update(extra=torch.ones(1))), "holds the tensor extra"),
    "wrong shape": (edit_config(intermediate_size=88), "but config.json gives 88 for intermediate_size"),
}
BROKEN_DRAFT = BROKEN | {
    "missing tensor": (edit_tensors(lambda t: t.pop("norm.weight")), "lacks the tensor norm.weight"),
    "extra tensor": (edit_tensors(lambda t: t.update(extra=torch.ones(1))), "holds the tensor extra"),
    "not a drafter": (edit_tensors(lambda t: t.pop("fc.weight")), "is not a drafter of a known layout"),
    "hidden size": (edit_config(hidden_size=60), "hidden size is 60, the target's is 48"),
    "vocabulary": (edit_config(vocab_size=1000), "vocabulary of 1000, the target's is"),
    "tap count": (edit_config(taps=[1, 2]), "fc.weight takes 144 features, 2 taps of 48 give 96"),
    "tap range": (edit_config(taps=[1, 2, 9]), "taps hidden state 9, but the target has hidden states 0 to 3"),
    "taps no list": (edit_config(taps=3), "taps must be a list"),
    "other forward": (edit_config(fc_norm=True), "sets fc_norm to True, but the file lacks fc_norm.0.weight"),
    "heads": (edit_config(num_key_value_heads=4), "6 attention heads cannot share 4"),
    "absolute d2t": (
        edit_tensors(lambda t: t["d2t"].add_(torch.arange(len(t["d2t"])) // 2)),
        "d2t and t2d name different",
    ),
}


def check_refused(run, message: str, **models):
    code, _, err = run("--prompt", "x", **models)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("case", BROKEN_TARGET)
def test_broken_targets(run, case, target_path, tmp_path):
    change, message = BROKEN_TARGET[case]
    check_refused(run, message, target=damaged(target_path, tmp_path / "copy", change))


@pytest.mark.parametrize("case", BROKEN_DRAFT)
def test_broken_drafters(run, case, drafter_path, tmp_path):
    change, message = BROKEN_DRAFT[case]
    check_refused(run, message, draft=damaged(drafter_path, tmp_path / "copy", change))


def test_missing_paths(run, tmp_path):
    for kind in ("target", "draft"):
        code, _, err = run("--prompt", "x", **{kind: tmp_path / "nowhere"})
        assert code == 2
        assert "no such checkpoint folder" in err
    code, _, err = run("--prompt", "x", draft="mtp")
    assert (code, err) == (2, "error: no such checkpoint folder: mtp; the bundled one is demo/mtp\n")
    code, _, err = run("--prompt", "x", draft=None)
    assert code == 2
    assert "a target of your own needs its drafter" in err


def test_hub_names_are_looked_up_and_refused_offline(run, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, _, err = run("--prompt", "x", target="nobody/nothing-of-this-name")
    assert code == 2
    assert "nobody/nothing-of-this-name is neither a local folder nor" in err


def test_a_file_that_does_not_belong_is_named(run, target_path, tmp_path):
    folder = damaged(
        target_path, tmp_path / "copy", lambda f: shutil.copy(f / "model.safetensors", f / "old.safetensors")
    )
    code, _, err = run("--prompt", "x", target=folder)
    assert code == 0
    assert "old.safetensors passed over" in err


def test_the_python_interface_in_a_fresh_process(target_path, drafter_path):
    program = (
        f"import specdec; t = specdec.load_target({str(target_path)!r})\n"
        f"d = specdec.load_drafter({str(drafter_path)!r}, t)\n"
        "out = specdec.generate(t, ['one', 'and two'], d, max_new_tokens=5); print(len(out.text), out.tau >= 1)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "2 True\n", done.stderr


def test_the_module_of_the_command_does_not_hide_the_function(target_path):
    target = specdec.load_target(target_path)
    expected = specdec.generate(target, "one", max_new_tokens=3).text
    importlib.import_module("specdec.generate")
    assert specdec.generate(target, "one", max_new_tokens=3).text == expected


def test_as_a_program(target_path, drafter_path):
    """A fresh process: exit code 2, one line, no traceback."""
    command = [
        sys.executable,
        "-m",
        "specdec.generate",
        "--target",
        str(target_path),
        "--draft",
        "nowhere/x/y",
        "--prompt",
        "x",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"}, check=False
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
