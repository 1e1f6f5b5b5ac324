"""Wrong inputs, generated from the schemas, are told in one sentence: a sample here, all in scripts/wrong_inputs.py."""

import json
import random

import pytest
from wrong_cases import CONTENTS, Case, all_cases, config_values, with_content
from wrong_files import EITHER, file_cases
from wrong_inputs import call, run

from specdec import registry
from specdec.api import DEMO_DRAFTER, DEMO_TARGET
from specdec.cli.hydra_settings import check_settings, check_words
from specdec.cli.reading import MOST_NODES, check_yaml
from specdec.model.checkpoint import read_json
from specdec.model.config_fields import check_config
from specdec.schema import check, ranged
from specdec.text import read_prompts
from specdec.training.data import read_conversations


@pytest.fixture(scope="module")
def cases():
    return all_cases()


def test_there_are_enough_of_every_kind(cases):
    assert len(cases) >= 1500
    assert {case.words[0] for case in cases} >= {"generate", "train", "regenerate", "cache", "sweep", "tune", "compare"}


def test_a_sample_is_told_in_one_sentence(cases, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    by_command: dict[str, list] = {}
    for case in cases:
        by_command.setdefault(f"{case.words[0]} {case.prepare is None}", []).append(case)
    drawn = [case for of_kind in by_command.values() for case in random.Random(0).sample(of_kind, 1)]
    assert len(drawn) > 12
    found = [run(case, tmp_path / "case") for case in drawn]
    assert [(o.case, o.fault) for o in found if o.fault] == []


def test_files_with_one_place_changed_are_told_or_taken(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    by_file: dict[str, list] = {}
    for case in file_cases():
        if case.codes == EITHER:
            by_file.setdefault(case.name.partition(":")[0], []).append(case)
        else:
            assert run(case, tmp_path / "case").fault == ""
    drawn = [random.Random(0).choice(of_file) for of_file in by_file.values()]
    assert len(drawn) > 10
    assert [(o.case, o.fault) for o in (run(case, tmp_path / "case") for case in drawn) if o.fault] == []


def test_the_judge_notices_what_is_taken_and_what_is_not_named(tmp_path):
    assert run(Case("right", ("doctor", "inspect", "draft")), tmp_path / "case").fault == "ended with 0"
    case = Case("unnamed", ("doctor", "inspect", "nowhere/at/all"), ("heads",))
    assert run(case, tmp_path / "case").fault.startswith("does not name")


@pytest.mark.parametrize("file", [DEMO_TARGET / "config.json", DEMO_DRAFTER / "config.json"])
def test_every_field_of_a_config_is_refused_by_its_name(file):
    config = json.loads(file.read_text())
    check_config(config, "x")
    count = 0
    for name, value in config_values():
        with pytest.raises(ValueError, match=name) as told:
            check_config(config | {name: value}, "x")
        assert "\n" not in str(told.value)
        assert len(str(told.value)) < 300
        count += 1
    assert count > 400


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
    class Fields:
        pass

    Fields.__annotations__ = {"a": int | None, "b": float}
    Fields.a, Fields.b = ranged(1, 3, None), ranged(0, 1, 0.5, above=True)
    from dataclasses import dataclass

    schema = dataclass(Fields)
    for right in ({"a": 1}, {"a": 3}, {"a": None}, {"b": 1}, {"b": 1e-9}, {}):
        check(schema, right, "x")
    for wrong in ({"a": 0}, {"a": 4}, {"a": 1.0}, {"a": True}, {"b": 0}, {"b": 1.1}, {"b": None}, {"b": float("nan")}):
        with pytest.raises(ValueError, match=f"x: {next(iter(wrong))} must be"):
            check(schema, wrong, "x")


@pytest.mark.parametrize("what", CONTENTS)
def test_json_files_that_are_none(what, tmp_path):
    with_content("config.json", CONTENTS[what])(tmp_path)
    with pytest.raises(ValueError, match=r"config\.json"):
        read_json(tmp_path / "config.json")


def test_a_byte_order_mark_is_no_mistake(tmp_path):
    line = json.dumps({"prompt": "What is a tree?"})
    for name, text in (("a.jsonl", line), ("a.txt", "What is a tree?")):
        (tmp_path / name).write_text(text + "\n", encoding="utf-8-sig")
        assert read_prompts(tmp_path / name) == ["What is a tree?"]
    (messages,) = read_conversations(tmp_path / "a.jsonl")
    assert messages[0]["content"] == "What is a tree?"


def test_yaml_that_blows_up_is_counted_and_not_built():
    bomb = "a0: &a0 [x,x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 64))
    with pytest.raises(ValueError, match=f"at most {MOST_NODES}"):
        check_yaml(bomb, "f")
    for text in ("a: &a [*a]", "[" * 20_000):
        with pytest.raises(ValueError, match="f is not a YAML file"):
            check_yaml(text, "f")
    check_yaml("a: &a {b: 1}\nc: *a\n", "f")


def whole(group: str, name: str) -> dict:
    """What a file of conf/ says, and below it what the files say that it stands on."""
    own = registry.settings(group, name)
    below = [entry for entry in own.pop("defaults", ()) if entry != "_self_"]
    return {key: value for entry in below for key, value in whole(group, entry).items()} | own


def settings_of(config: str) -> dict:
    own = registry.read_yaml(registry.CONF / f"{config}.yaml", "settings")
    pairs = [pair for entry in own.pop("defaults") if isinstance(entry, dict) for pair in entry.items()]
    own.pop("hydra")
    groups = {g: whole(g, n) for g, n in pairs if " " not in g and n is not None}
    return own | groups


@pytest.mark.parametrize("config", ["train", "cache", "sweep", "compare", "bench", "round_cost"])
def test_what_conf_says_itself_is_taken(config):
    check_settings(settings_of(config), config)


@pytest.mark.parametrize("name", registry.names("experiment"))
def test_what_an_experiment_says_is_taken(name):
    check_settings({k: v for k, v in registry.settings("experiment", name).items() if k != "defaults"}, "train")


def test_what_every_file_of_a_group_says_is_taken():
    settings = settings_of("train")
    for group in ("drafter", "objective", "trainer"):
        for name in registry.names(group):
            check_settings(settings | {group: whole(group, name)}, "train")


@pytest.mark.parametrize(
    ("config", "path", "value", "message"),
    [
        ("train", "resmue", True, "there is no setting resmue; there is resume"),
        ("train", "trainer.stps", 3, r"there is no setting trainer.stps; there is trainer.steps"),
        ("train", "target.path", "", "target.path is empty"),
        ("train", "data.heldout", -1, "data.heldout must be at least 0, got -1"),
        ("train", "trainer.lr", float("nan"), "trainer.lr must be a finite number"),
        ("train", "trainer.log_every", None, "trainer.log_every must be a whole number, got null"),
        ("sweep", "topk", [1, 10**9], "topk must be at most 1024"),
        ("sweep", "steps", 10**6, "steps must be at most 256"),
        ("train", "drafter.intermediate_size", 10**9, "drafter.intermediate_size must be at most"),
        ("train", "objective.steps", 10**6, "objective.steps must be at most 256"),
        ("train", "objective.stps", 3, r"there is no setting objective.stps; there is objective.steps"),
        ("train", "objective.switch", "abc", "objective.switch must be a number, got 'abc'"),
        ("train", "trainer.muon_lr", {"a": 1}, "trainer.muon_lr must be a number from 0 to 100 or null"),
        ("train", "trainer.clip", 0, "trainer.clip must be above 0, got 0"),
        ("compare", "trials", "two", "trials must be a whole number, got 'two'"),
    ],
)
def test_settings_of_hydra_commands(config, path, value, message):
    settings = settings_of(config)
    inner = settings
    for name in path.split(".")[:-1]:
        inner = inner[name]
    inner[path.split(".")[-1]] = value
    with pytest.raises(ValueError, match=message):
        check_settings(settings, config)


def test_flags_of_other_commands_are_no_settings():
    check_words(["data.path=x", "--cfg", "job", "--multirun", "-m", "--config-dir=x", "--conf", "~entries"])
    for words in (["--data", "x"], ["--prompts=x"]):
        with pytest.raises(
            ValueError, match=r"there is no flag --\w+: settings are written NAME=VALUE, without dashes"
        ):
            check_words(words)


def test_a_setting_without_a_value_is_told_how_it_is_written(tmp_path):
    code, err = call(("train", "data.path", "conv.jsonl"), tmp_path)
    assert code == 2
    assert err.startswith("error: Error parsing override 'data.path': settings are written NAME=VALUE; quote a value")
    code, err = call(("bench", "configurations={short:{new_tokens:4}}"), tmp_path)
    assert (code, err) == (2, "error: Could not override 'configurations': it holds no 'new_tokens'\n")


def test_an_unset_variable_does_not_decode_the_demo(tmp_path):
    for flag in ("--target", "--draft", "--prompt-file", "--token-map", "--trace", "--settings"):
        code, err = call(("generate", "--prompt", "x", flag, ""), tmp_path)
        assert code == 2
        assert f"error: {flag} is empty" in err
