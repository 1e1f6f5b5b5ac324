"""The command line: what it prints, any character in a prompt, and one sentence for each mistake."""

import json
import math
import shutil
import statistics
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import edit_config, edit_tensors, main_of
from safetensors.torch import load_file

from specdec import registry
from specdec.api import make_tree
from specdec.cli import session, summary
from specdec.machine import machine


@pytest.fixture
def run(target_path, drafter_path, capsys):
    """Call the command with the tiny pair; returns (exit code, standard output, standard error)."""

    def call(*args, target=target_path, draft=drafter_path):
        models = [*(("--target", target) if target else ()), *(("--draft", draft) if draft else ())]
        try:
            main_of("generate")([*map(str, (*models, *args))])
            code = 0
        except SystemExit as stop:
            code = stop.code
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def found(run):
    """Call it with --json, where it must end well, with the plain text if there is one; returns the object and what was
    on the screen before."""

    def call(*args, prompt="The quick", **models) -> dict:
        given = () if "--prompts" in args else ("--prompt", prompt)
        code, out, err = run(*given, *args, "--json", **models)
        assert code == 0, err
        screen, _, last = out.rstrip("\n").rpartition("\n")
        result = json.loads(last) | {"screen": screen}
        assert ("identical" in result) == ("--compare" in args)
        assert result.get("identical", True) is True
        return result

    return call


def refused(run, *args, **models) -> str:
    """Return the one sentence with which the command refuses its arguments."""
    code, _, err = run(*args, **models)
    assert (code, err.count("\n")) == (2, 1), err
    assert err.startswith("error: ")
    return err


def test_json_has_what_is_promised(found):
    result = found("--max-new-tokens", 20, "--compare")
    assert len(result["token_ids"]) == result["num_tokens"] <= 20
    assert result["tau"] == pytest.approx((result["num_tokens"] - 1) / result["rounds"])
    assert len(result["acceptance_by_depth"]) == 3  # the default on a CPU of a drafter without acceptance.json
    assert isinstance(result["text"], str)


def test_compare_takes_turns_until_the_time_is_long_enough(found, run, monkeypatch):
    for enough, turns in ((0, 1), (math.inf, session.PASSES)):
        monkeypatch.setattr(session, "LONG_ENOUGH", enough)
        result = found("--max-new-tokens", 8, "--compare")
        assert len(result["speedups"]) == turns
        assert result["speedup"] == statistics.median(result["speedups"])
        assert result["speedup"] == pytest.approx(result["tokens_per_second"] / result["baseline_tokens_per_second"])
    assert ", the median of 5 turns (" in run("--prompt", "The quick", "--max-new-tokens", 8, "--compare")[1]


@pytest.mark.parametrize("flags", ["--token-map MAP", "--draft-dtype bf16", "--draft-dtype int8"])
def test_settings_of_the_drafter_change_no_text(found, tmp_path, flags):
    (tmp_path / "map.json").write_text(json.dumps(list(range(40))))
    words = flags.replace("MAP", str(tmp_path / "map.json")).split()
    result = found("--max-new-tokens", 20, "--compare", *words)
    assert ("tokens to propose" in result["drafter"].get("token map", "")) == ("MAP" in flags)


def test_products_may_be_less_exact(found, run, matmul_precision):
    flags = ("--max-new-tokens", 20, "--compare", "--matmul-precision")
    assert found(*flags, "medium")["matmul_precision"] == "medium"
    assert "products: medium precision" in run("--prompt", "The quick", *flags, "medium")[1]
    assert machine(torch.device("cpu"))["matmul_precision"] == "medium"  # costs are cached for each precision
    assert "invalid choice: 'bf16' (choose from 'highest', 'high'" in run(*flags, "bf16")[2]


def test_summary_and_trees(run):
    words = ("--prompt", "The quick", "--max-new-tokens", 12, "--show-trees", "--topk", 2, "--steps", 2)
    code, out, _ = run(*words, "--compare")
    assert code == 0
    for shown in ("identical: yes (1 of 1)", "time by part: ", "|-- "):
        assert shown in out
    assert "\033[" not in out, "colours belong on a terminal only"


SMALLER = "a smaller tree costs less a round (--topk 1 --steps 3), "
AUTO = "--tree auto chooses by what is measured, "


@pytest.mark.parametrize(
    ("steps", "acceptance", "said"), [(5, "measured", SMALLER + AUTO), (3, "measured", AUTO), (2, None, "")]
)
def test_what_is_advised_where_a_drafter_does_not_pay(steps, acceptance, said):
    session = SimpleNamespace(tree=make_tree(1, steps), choice=None, drafter=SimpleNamespace(acceptance=acceptance))
    assert summary._faster(session) == f"{said}specdec tune finds the fastest setting"


ODD = (
    "日本語 ünïcode 🎉", "tabs\tand\nnewlines", "<|end|><|user|>", "\x00\x07", "\udcff\udc80", "half a pair \ud83d",
    "'\"\\$`%s{}", "日本語 Café",
)  # fmt: skip


@pytest.mark.parametrize("prompt", ODD)
def test_any_characters(found, prompt):
    """Sampled from a random model: most tokens are parts of characters, which come in pieces or not at all. The
    streamed text is the final text."""
    result = found("--max-new-tokens", 60, "--temperature", 1, prompt=prompt)
    assert result["num_tokens"] >= 1
    assert result["screen"] == result["text"]


def test_one_token_has_no_speed(run):
    code, out, err = run("--prompt", "fox", "--max-new-tokens", 1, "--compare")
    assert code == 0, err
    assert "speculative to plain: -" in out
    assert "1 token in 0 rounds\n" in out
    assert "accepted to depth" not in out


def test_drafters_without_training_and_a_tree_from_a_file(found, tmp_path, target_path):
    tree = tmp_path / "tree.yaml"
    tree.write_text("paths: [[0], [1], [0, 0], [0, 0, 0]]")
    for draft in ("ngram", "ngram:suffix", target_path):
        result = found("--tree", tree, "--compare", prompt="The fox", draft=draft)
        assert len(result["acceptance_by_depth"]) == 3
    assert result["acceptance_by_depth"][0] > 0.9, "the target as its own drafter"


def test_prompt_files_and_batches_agree(found, tmp_path):
    prompts = ["The quick brown", "What is 12?", "日本語", "It is"]
    rows = [
        {"prompt": prompts[0]}, {"turns": [prompts[1], "x"]},
        {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": prompts[2]}]},
        {"conversations": [{"from": "human", "value": prompts[3]}, {"from": "gpt", "value": "x"}]},
    ]  # fmt: skip
    text, lines = tmp_path / "p.txt", tmp_path / "p.jsonl"
    text.write_text("\n".join(prompts), encoding="utf-8")
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def ids(file, *more):
        return found("--prompts", file, "--max-new-tokens", 12, *more)["token_ids"]

    assert len(first := ids(text)) == 4
    assert ids(text, "--batch-size", 2) == ids(lines) == ids(lines, "--batch-size", 3) == first
    assert ids(text, "--limit", 2) == first[:2]


# The bundled pair
DEMO = {"target": None, "draft": None, "prompt": "Write a poem."}


def test_a_stop_string_ends_text_and_screen(found):
    text = found("--max-new-tokens", 24, **DEMO)["text"]
    word = text.split()[3]
    result = found("--max-new-tokens", 24, "--stop", "never said", "--stop", word, "--compare", **DEMO)
    assert result["finish"] == "stop"
    assert result["text"] == result["screen"] == text[: text.index(word)]


def test_a_text_is_json_of_a_schema(found, run, tmp_path):
    pytest.importorskip("llguidance")
    file = tmp_path / "schema.json"
    file.write_text('{"type": "array", "items": {"enum": ["sea", "sky"]}, "minItems": 2, "maxItems": 2}')
    result = found("--max-new-tokens", 24, "--json-schema", file, "--compare", **DEMO)
    assert set(json.loads(result["text"])) <= {"sea", "sky"}
    file.write_text('{"type": "arrey"}')
    assert run("--prompt", "x", "--json-schema", file)[0] == 2


def test_penalties_and_logprobs(found):
    without = found("--max-new-tokens", 24, **DEMO)
    assert "logprobs" not in without
    penalties = ("--repetition-penalty", "2", "--presence-penalty", "1", "--frequency-penalty", "0.5")
    result = found("--max-new-tokens", 24, *penalties, "--compare", "--logprobs", **DEMO)
    assert result["token_ids"] != without["token_ids"]
    assert len(result["logprobs"]) == len(result["token_ids"])
    assert max(result["logprobs"]) <= 0


def test_sampled_answers_do_not_depend_on_the_batch_or_the_draft(found, run, tmp_path):
    """Nor on the children, and `--compare` says so."""
    (tmp_path / "prompts.txt").write_text("The quick\nWhat is\nEin\nThe lazy dog\n")
    flags = ("--prompts", tmp_path / "prompts.txt", "--temperature", 0.9, "--top-p", 0.95, "--max-new-tokens", 12)
    ways = ("--compare",), ("--batch-size", 3), ("--topk", 1, "--compare"), ("--children", "likeliest", "--compare")
    reported = [found(*flags, *more)["token_ids"] for more in ways]
    reported.append(found(*flags, "--no-draft", draft=None)["token_ids"])
    assert reported == [reported[0]] * 5
    assert found(*flags, "--seed", 1)["token_ids"] != reported[0]
    assert "drawn children need a tree that knows" in refused(run, *flags, "--children", "drawn")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--prompt", "  \n"], "the prompt is empty"),
        (["--prompt", "fox " * 400], "tokens, the target's context holds 128"),
        (["--prompt", "x", "--topk", "2", "--steps", "2", "--num-draft-tokens", "9"], "a tree holds 2 to 7 tokens"),
        (["--prompt", "x", "--topk", "1", "--num-draft-tokens", "9"], "a chain of steps + 1 = 6 tokens"),
        (["--prompt", "x", "--topk", "500"], "but the draft vocabulary has"),
        (["--prompt", "x", "--prompts", "y"], "exactly one of"),
        (["--prompt", "x", "--compile", "--no-graphs"], "--no-graphs contradicts --compile"),
        (["--prompt", "x", "--top-k", "5"], "need a temperature above 0"),
        (["--prompt", "x", "--tree", "block"], "a block tree takes drafters that guess a block at once, and this one"),
        (["--prompt", "x", "--tree", "/no/such"], "no such tree file"),
        (["--chat", "--json"], "--json contradicts --chat"),
        (["--prompt", "x", "--json-schema", "/no/such"], "no such JSON schema file"),
        (["--prompt", "x", "--stop", ""], "a stop string needs at least one character"),
        (["--prompt", "x", "--logprobs"], "--logprobs needs --json"),
        (["--prompt", "x", "--limit", "2"], "--limit needs --prompts"),
        (["--prompt", "x", "--qqq"], "there is no flag --qqq; specdec generate --help lists all"),
        (["--prompt", "What", "is", "12?"], "is belongs to no flag: a text with spaces needs quotes around it"),
        (["--prompt", "x", "--tree", "oak"], f"no tree 'oak': choose one of {', '.join(registry.names('tree'))}, or "),
        (["--prompt", "x", "--draft", "ngram", "--draft-dtype", "bf16"], "dtype are for drafters that learn"),
        (["--prompt", "x", "--token-map", "nowhere.json"], "no such token map: nowhere.json"),
        (["--prompt", "x", "--feedback", "pre"], "its own config says what it feeds back"),
        (["--prompt", "x", "--draft", "mtp"], "no such checkpoint folder: mtp; the bundled one is demo/mtp"),
    ],
)
def test_mistakes_are_one_sentence(run, args, message):
    assert message in refused(run, *args)


def test_prompts_are_checked_before_the_first_is_answered(run, tmp_path):
    (tmp_path / "p.txt").write_text(f"fox\n{'fox ' * 400}\n")
    code, out, err = run("--prompts", str(tmp_path / "p.txt"))
    assert (code, out) == (2, "")
    assert "the target's context holds 128, new ones included (prompt 2 of 2)" in err


# What a checkpoint does not say for itself, and what does not fit its target; tests/formats has the rest.
BROKEN = {
    "no weights": ("target", lambda f: (f / "model.safetensors").unlink(), "it has no safetensors"),
    "no config": ("target", lambda f: (f / "config.json").unlink(), "it has no config.json"),
    "shape": ("target", lambda f: edit_config(f, intermediate_size=88), "config.json gives 88 for intermediate_size"),
    "hidden size": ("draft", lambda f: edit_config(f, hidden_size=60), "hidden size is 60, the target's is 48"),
    "vocabulary": ("draft", lambda f: edit_config(f, vocab_size=1000), "vocabulary of 1000, the target's is"),
    "tap range": (
        "draft", lambda f: edit_config(f, taps=[1, 2, 9]),
        "taps hidden state 9, but the target has hidden states 0 to 3",
    ),
    "taps no list": ("draft", lambda f: edit_config(f, taps=3), "taps must be a list"),
    "heads": ("draft", lambda f: edit_config(f, num_key_value_heads=4), "6 attention heads cannot share 4"),
    "other ids in d2t": (
        "draft", lambda f: edit_tensors(f, d2t=load_file(f / "model.safetensors")["d2t"] * 2),
        "d2t and t2d name different",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_checkpoint_is_one_sentence(run, case, target_path, drafter_path, tmp_path):
    kind, change, message = BROKEN[case]
    shutil.copytree({"target": target_path, "draft": drafter_path}[kind], tmp_path / "copy")
    change(tmp_path / "copy")
    assert message in refused(run, "--prompt", "x", **{kind: tmp_path / "copy"})


def test_names_are_looked_up_and_refused(run, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    name = "nobody/nothing-of-this-name"
    assert f"{name} is neither a local folder nor" in refused(run, "--prompt", "x", target=name)
    said = refused(run, "--prompt", "x", target=name, draft=None)
    ways = "give --draft FOLDER, or --draft ngram, or --no-draft to decode plainly"
    assert f"no drafter is bundled for {name}: {ways}" in said


def test_a_file_that_does_not_belong_is_named(run, target_path, tmp_path):
    shutil.copytree(target_path, tmp_path / "copy")
    shutil.copy(tmp_path / "copy" / "model.safetensors", tmp_path / "copy" / "old.safetensors")
    code, _, err = run("--prompt", "x", target=tmp_path / "copy")
    assert code == 0
    assert "old.safetensors passed over" in err


def fresh(*words: object) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, check=False)


def test_the_python_interface_in_a_fresh_process(target_path, drafter_path):
    """The module of the command does not hide the function."""
    program = "import sys, specdec, specdec.generate; target = specdec.load_target(sys.argv[1])\n"
    program += "out = specdec.generate(target, ['one', 'and two'], sys.argv[2], max_new_tokens=5)\n"
    done = fresh("-c", program + "print(len(out.text), out.tau >= 1)", target_path, drafter_path)
    assert done.stdout == "2 True\n", done.stderr


def test_as_a_program(target_path):
    done = fresh("-m", "specdec.generate", "--target", target_path, "--draft", "./nowhere", "--prompt", "x")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "Traceback" not in done.stderr
