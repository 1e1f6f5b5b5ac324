"""`acceptance.json` with one thing wrong is refused in one sentence, which says what."""

import json

import pytest

from specdec.acceptance import FILE, Acceptance, AlongTexts, read_acceptance

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
        (RIGHT | {"measured": [ENTRY | {"temperature": -1}]}, "temperature must be at least 0, got -1"),
    ],
)
def test_a_damaged_file_is_one_sentence(tmp_path, content, why):
    (tmp_path / FILE).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"holds no measured acceptance \({why}.*write it anew with specdec tree"):
        read_acceptance(tmp_path)
