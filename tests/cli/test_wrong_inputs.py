"""Wrong inputs, generated from the schemas, end with one sentence that names the mistake."""

import gc
import json
import random
from dataclasses import make_dataclass
from functools import cache

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from wrong_cases import Case, call, cases, config_values, run

from specdec import registry
from specdec.api import DEMO_DRAFTER, DEMO_TARGET
from specdec.cli.commands import COMMANDS
from specdec.cli.hydra_settings import check_settings
from specdec.cli.hydra_words import bare, hydra_words
from specdec.model.config_fields import check_config
from specdec.schema import check, ranged
from specdec.text import read_prompts
from specdec.training.data import read_conversations

PARTS = 40


@cache
def all_cases() -> list[Case]:
    """Return all cases in a fixed random order."""
    found = cases()
    random.Random(0).shuffle(found)
    gc.collect()
    gc.freeze()  # every case collects garbage: this process has a lot that is none
    return found


def test_there_are_enough_cases_of_every_kind():
    assert len(all_cases()) >= 4000
    assert {case.words[0] for case in all_cases()} >= {"generate", "train", "data", "sweep", "checkpoint"}


@pytest.mark.matrix
@pytest.mark.parametrize("part", range(PARTS))
def test_wrong_inputs_end_with_one_sentence(part, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    faults = {case.name: run(case, tmp_path / "case") for case in all_cases()[part::PARTS]}
    assert {name: fault for name, fault in faults.items() if fault} == {}


def test_the_judge_notices_what_is_taken_and_what_is_not_named(tmp_path):
    assert run(Case("right", ("checkpoint", "inspect", "draft")), tmp_path / "case") == "ended with 0"
    case = Case("unnamed", ("checkpoint", "inspect", "nowhere/at/all"), ("heads",))
    assert run(case, tmp_path / "case").startswith("does not name")


@pytest.mark.parametrize("file", [DEMO_TARGET / "config.json", DEMO_DRAFTER / "config.json"])
def test_every_field_of_a_config_is_refused_by_its_name(file):
    config, wrong = json.loads(file.read_text()), list(config_values())
    check_config(config, "x")
    assert len(wrong) > 400
    for name, value in wrong:
        with pytest.raises(ValueError, match=rf"\A.*{name}.*\Z") as raised:  # one line
            check_config(config | {name: value}, "x")
        assert len(str(raised.value)) < 300


def test_ropes_and_nested_configs_are_checked_too():
    for rope in ({"factor": "2"}, {"rope_theta": 0}, {"low_freq_factor": 4.0, "high_freq_factor": 4.0}):
        with pytest.raises(ValueError, match="rope_scaling"):
            check_config({"rope_scaling": rope}, "x")
        with pytest.raises(ValueError, match="text_config: rope_scaling"):
            check_config({"text_config": {"rope_scaling": rope}}, "x")


def test_a_family_that_only_transformers_knows_may_have_a_number_for_each_layer():
    check_config({"num_key_value_heads": [2, 4], "intermediate_size": None}, "x", native=False)
    with pytest.raises(ValueError, match="num_hidden_layers must be at most 1024"):
        check_config({"num_hidden_layers": 10**9}, "x", native=False)


def test_ranges_hold_at_their_ends():
    fields = [("a", int | None, ranged(1, 3, None)), ("b", float, ranged(0, 1, 0.5, above=True))]
    schema = make_dataclass("Fields", fields)
    for right in ({"a": 1}, {"a": 3}, {"a": None}, {"b": 1}, {"b": 1e-9}, {}):
        check(schema, right, "x")
    for wrong in ({"a": 0}, {"a": 4}, {"a": 1.0}, {"a": True}, {"b": 0}, {"b": 1.1}, {"b": None}, {"b": float("nan")}):
        with pytest.raises(ValueError, match=f"x: {next(iter(wrong))} must be"):
            check(schema, wrong, "x")


def test_a_byte_order_mark_is_no_mistake(tmp_path):
    line = json.dumps({"prompt": "What is a tree?"})
    for name, text in (("a.jsonl", line), ("a.txt", "What is a tree?")):
        (tmp_path / name).write_text(text + "\n", encoding="utf-8-sig")
        assert read_prompts(tmp_path / name) == ["What is a tree?"]
    (messages,) = read_conversations(tmp_path / "a.jsonl")
    assert messages[0]["content"] == "What is a tree?"


# Settings of Hydra's commands


def settings_of(config: str, *overrides: str) -> dict:
    with initialize_config_dir(str(registry.CONF), version_base="1.3"):
        return OmegaConf.to_container(compose(config, list(overrides)))


@pytest.mark.parametrize(
    "words",
    [[name] for name in ("train", "cache", "sweep", "compare", "bench")]
    + [["train", f"+experiment={name}"] for name in registry.names("experiment")]
    + [["train", f"{group}={name}"] for group in ("drafter", "objective", "trainer") for name in registry.names(group)],
    ids=" ".join,
)
def test_the_settings_in_conf_are_valid(words):
    check_settings(settings_of(*words), words[0])


@pytest.mark.parametrize(
    ("config", "path", "value", "message"),
    [
        ("train", "resmue", True, "there is no setting resmue; there is resume"),
        ("train", "trainer.stps", 3, "there is no setting trainer.stps; there is trainer.steps"),
        ("train", "data.heldout", -1, "data.heldout must be at least 0, got -1"),
        ("train", "trainer.log_every", None, "trainer.log_every must be a whole number from 1 to 2147483648, got null"),
        ("sweep", "topk", [1, 10**9], "topk must be at most 1024"),
        ("sweep", "steps", 10**6, "steps must be at most 256"),
        ("train", "drafter.intermediate_size", 10**9, "drafter.intermediate_size must be at most"),
        ("train", "trainer.muon_lr", {"a": 1}, "trainer.muon_lr must be a number from 0 to 100 or null"),
        ("train", "trainer.clip", 0, "trainer.clip must be above 0, got 0"),
        ("train", "drafter.draft_vocab_size", "most", "drafter.draft_vocab_size must be a whole number"),
    ],
)
def test_settings_of_hydra_commands(config, path, value, message):
    settings = OmegaConf.create(settings_of(config))
    OmegaConf.update(settings, path, value, merge=False)
    with pytest.raises(ValueError, match=message):
        check_settings(OmegaConf.to_container(settings), config)


TRAIN = COMMANDS["train"]


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        ("--target=T --data D", "target.path=T data.path=D"),
        ("--dtype fp32 --matmul-precision medium", "target.dtype=fp32 target.matmul_precision=medium"),
        ("target=demo data=ultrachat seed=3 limit=9", "target=demo data=ultrachat trainer.seed=3 data.limit=9"),
        ("drafter.taps=1,4 --resume --device cuda", "drafter.taps=[1,4] resume=true device=cuda"),
        ("drafter=eagle3,mtp --multirun", "--multirun drafter=eagle3,mtp"),
        ("-cd x seed=1,2 --multirun limit=9", "-cd x --multirun trainer.seed=1,2 data.limit=9"),
        ("--cfg job -cd x ~entries drafter.taps=[1,2]", "--cfg job -cd x ~entries drafter.taps=[1,2]"),
        ("out=${x} trainer.steps=3", "out=${x} trainer.steps=3"),
    ],
)
def test_the_words_that_all_commands_share_are_settings(given, settings):
    assert hydra_words("train", TRAIN.words, {}, given.split()) == settings.split()


def test_drafters_of_a_list_may_hold_spaces_and_a_tree_stays_whole():
    words = hydra_words("compare", COMMANDS["compare"].words, {}, ["--draft", "Käse 1/x, ngram", "--tree", "drawn 3,1"])
    with initialize_config_dir(str(registry.CONF), version_base="1.3"):
        settings = compose("compare", words)
    assert list(settings.draft) == ["Käse 1/x", "ngram"]
    assert settings.draft_tree == "drawn 3,1"


def test_a_path_may_hold_anything():
    for path in ("a b", "Käse", "it's", "a,b", "x=1", "(1)", 'say "hi"', "back\\slash"):
        (word,) = hydra_words("train", TRAIN.words, {}, [f"target={path}"])
        with initialize_config_dir(str(registry.CONF), version_base="1.3"):
            assert compose("train", [word]).target.path == path
        assert bare(word.partition("=")[2]) == path, "as from=PATH is read"


def test_a_setting_without_a_value_shows_how_it_is_written(tmp_path):
    for given in ("data.path", "my setting=3"):
        code, err = call(("train", given), tmp_path)
        assert code == 2
        assert err.startswith(f"error: cannot read {given!r}: settings are written NAME=VALUE; quote a value")
    code, err = call(("lab", "bench", "configurations={short:{new_tokens:4}}"), tmp_path)
    assert (code, err) == (2, "error: Could not override 'configurations': it holds no 'new_tokens'\n")
