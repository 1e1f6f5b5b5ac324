"""Settings files: what `generate --settings` takes, what overrides it, and what is refused."""

import argparse
from dataclasses import fields
from pathlib import Path

import pytest
from helpers import main_of, refused

from specdec.api import ModelSettings
from specdec.cli.checks import KINDS, with_settings
from specdec.cli.commands import parser_of
from specdec.cli.reading import check_yaml
from specdec.structs import Sampling
from specdec.trees.spec import TreeSettings
from specdec.verify import VerifierSettings


@pytest.fixture
def parse(tmp_path):
    """(the file's text, flags) -> what the command sees."""

    def call(text: str, *flags: str) -> argparse.Namespace:
        (tmp_path / "s.yaml").write_text(text, encoding="utf-8")
        return with_settings(parser_of("generate"), ["--settings", str(tmp_path / "s.yaml"), *flags])

    return call


TREE = "topk: 2\nsteps: 3\nnum_draft_tokens: 6\ndraft: ngram\nverifier: match\nreport: {predicted: 1.5, any: [thing]}\n"


def test_a_file_stands_for_its_flags(parse):
    args = parse(TREE, "--prompt", "x")
    typed = ["--topk", "2", "--steps", "3", "--num-draft-tokens", "6"]
    typed += ["--draft", "ngram", "--verifier", "match", "--prompt", "x"]
    assert vars(args) | {"settings": None} == vars(parser_of("generate").parse_args(typed))


@pytest.mark.parametrize(
    ("text", "flags", "expected"),
    [
        (
            TREE, ["--steps", "2", "--draft", "elsewhere"],
            {"topk": 2, "steps": 2, "num_draft_tokens": 6, "draft": "elsewhere"},
        ),
        ("dtype: bf16\n", ["--dtype", "auto"], {"dtype": "auto"}),  # a default that is typed
        ("tree: t.yaml\ndraft: d\n", ["--topk", "2"], {"tree": None, "topk": 2, "draft": "d"}),
        (TREE, ["--tree", "t.yaml"], {"topk": None, "steps": None, "num_draft_tokens": None, "draft": "ngram"}),
        (TREE, ["--no-draft"], {"no_draft": True, "topk": None, "draft": None, "verifier": None}),
        ("no_draft: true\n", ["--topk", "2"], {"no_draft": False, "topk": 2}),
        ("no_draft: true\n", [], {"no_draft": True}),
        ("no_draft: false\ntopk: 2\n", [], {"no_draft": False, "topk": 2}),
        ("draft: d\ntoken_map: m.json\nsteps: 2\n", ["--draft", "e"], {"draft": "e", "token_map": None, "steps": 2}),
        ("temperature: 1\ntop_k: 5\npresence_penalty: -0.5\n", ["--temperature", "0"], {"temperature": 0, "top_k": 5}),
        ("draft: d\ndraft_dtype: bf16\n", ["--steps", "3"], {"draft": "d", "draft_dtype": "bf16", "steps": 3}),
    ],
)  # fmt: skip
def test_the_command_line_overrides_the_file_and_what_contradicts_it_gives_way(parse, text, flags, expected):
    args = vars(parse(text, *flags))
    assert {key: args[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("topk: 2\nwidth: 3\n", "unknown setting 'width'; known are target, draft,"),
        ("topk: four\n", "topk must be a whole number or null, got 'four'"),
        ("topk: true\n", "topk must be a whole number or null, got True"),
        ("min_p: much\n", "min_p must be a number or null, got 'much'"),
        ("top_p: true\n", "top_p must be a number or null, got True"),
        ("no_draft: 1\n", "no_draft must be true or false or null, got 1"),
        ("draft: [a, b]\n", "draft must be a text or null, got ['a', 'b']"),
        ("topk: 10000\n", "s.yaml: --topk must be at most 1024, got 10000"),
        ("dtype: ''\n", "s.yaml: --dtype is empty"),
        ("- topk\n", "holds no settings"),
        ("topk: [\n", "is not a YAML file"),
        ("draft: ngram\ntopk: 010\n", "s.yaml line 2 has 010, which YAML reads as a number to base 8"),
        ("temperature: -1:30.5\n", "s.yaml line 1 has -1:30.5, which YAML reads as a number to base 60"),
        ("tree: [{a: 1_0, b: 1:30}]\n", "s.yaml line 1 has 1:30, which"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, text, message):
    (tmp_path / "s.yaml").write_text(text, encoding="utf-8")
    assert message in refused(main_of("generate"), "--settings", tmp_path / "s.yaml", "--prompt", "x")


@pytest.mark.parametrize("text", ["'010'", "007", "0", "0x1F", "12:30 pm", "2026-01-02T10:00:00", "08", "1_000"])
def test_numbers_that_all_read_alike_are_taken(text):
    check_yaml(f"seed: {text}", "s.yaml")


@pytest.mark.parametrize("part", [Sampling, ModelSettings, TreeSettings, VerifierSettings])
def test_a_field_is_a_flag_and_a_key_of_a_file(part):
    """With its type and default."""
    typed = {action.dest: action for action in parser_of("generate")._actions}
    for field in fields(part):
        assert typed[field.name].default == field.default
        assert KINDS[field.name] in (bool, int, float, str, Path)
    assert {field.name: KINDS[field.name] for field in fields(Sampling)} == {f.name: f.type for f in fields(Sampling)}
