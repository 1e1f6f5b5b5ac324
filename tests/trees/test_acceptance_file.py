"""`acceptance.json` with one thing wrong is refused in one sentence, which says what."""

import json

import pytest

from specdec.acceptance import FILE, Acceptance, AlongTexts, read_acceptance
from specdec.drafters.formats import load_drafter, save_drafter
from specdec.lab.replay import optimal_tree
from specdec.model.loader import load_target
from specdec.training.loop.evaluate import Decoding

ENTRY = {"temperature": 0.0, "topk": 3, "steps": 3, "texts": ["001 01 - 20 -"]}
RIGHT = json.loads(Acceptance((AlongTexts(**ENTRY),), "some answers").as_text())


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (3, "its format is not 'specdec acceptance 1'"),
        ({}, "its format is not 'specdec acceptance 1'"),
        (RIGHT | {"format": "specdec acceptance 0"}, "its format is not 'specdec acceptance 1'"),
        (RIGHT | {"about": 3}, "about must be a text, got 3"),
        (RIGHT | {"measured": []}, r"measured must be a list with entries, got \[\]"),
        (RIGHT | {"measured": 3}, "measured must be a list with entries, got 3"),
        (RIGHT | {"measured": [3]}, "an entry of measured has temperature, topk, steps, texts, and not 3"),
        (RIGHT | {"measured": [{"topk": 3}]}, "an entry of measured has .*, and not {'topk': 3}"),
        (RIGHT | {"measured": [ENTRY | {"texts": ["003"]}]}, "'003' is no word of ranks below 3"),
        (RIGHT | {"measured": [ENTRY | {"texts": ["0000"]}]}, "'0000' is no word .* on at most 3 levels"),
        (RIGHT | {"measured": [ENTRY | {"texts": "000"}]}, "texts must be a list, each entry a text, got '000'"),
        (RIGHT | {"measured": [ENTRY, ENTRY | {"temperature": 1, "texts": ["", ""]}]}, "the texts at temperature 1"),
        (RIGHT | {"measured": [ENTRY | {"texts": []}]}, "the texts at temperature 0 hold no word"),
        (RIGHT | {"measured": [ENTRY | {"temperature": -1}]}, "temperature must be at least 0, got -1"),
    ],
)
def test_a_damaged_file_is_one_sentence(tmp_path, content, why):
    (tmp_path / FILE).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"holds no measured acceptance \({why}.*write it anew with specdec tree"):
        read_acceptance(tmp_path)


def test_answers_of_one_token_make_no_file(target_path, drafter_path, tmp_path, capsys):
    draft, prompts = tmp_path / "draft", tmp_path / "prompts.txt"
    save_drafter(load_drafter(drafter_path, target := load_target(target_path)), draft, target)
    prompts.write_text("what is a tree?\n")
    words = ["--target", str(target_path), "--draft", str(draft), "--prompt-file", str(prompts), "--raw"]
    with pytest.raises(SystemExit) as stopped:
        optimal_tree.main([*words, "--max-new-tokens", "1", "--keep", "--out", str(tmp_path / "tree.yaml")])
    assert stopped.value.code == 2
    assert "every answer is one token long" in capsys.readouterr().err
    assert not (tmp_path / "tree.yaml").exists()
    for tokens in (1, 4):  # a run of training, which goes on without the file
        assert read_acceptance(draft) is None
        Decoding(target, [[3, 5]], "prompts", 2, tokens).keep_acceptance(draft)
    assert read_acceptance(draft) is not None
