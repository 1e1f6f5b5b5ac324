"""A target with layers in memory and on disk decodes the text of one in memory."""

import json

import pytest
import torch

from specdec.api import generate, load_drafter
from specdec.model.loader import load_target
from specdec.training.loop.measure import spread_target


@pytest.fixture
def spread(target_path, tmp_path, monkeypatch):
    """Two of three layers, the embedding and the head are on disk."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    places = {"model.embed_tokens": "disk", "model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "disk",
              "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}  # fmt: skip
    (tmp_path / "map.json").write_text(json.dumps(places))
    return load_target(target_path, device_map=str(tmp_path / "map.json"))


def test_layers_on_disk_decode_the_same_text(spread, target_path, drafter_path):
    held = load_target(target_path)
    weights = {name: p.device.type for name, p in spread.model.named_parameters()}
    assert weights["model.layers.1.mlp.up_proj.weight"] == "meta"
    placed = spread_target(spread)
    assert set(placed) == {"cpu", "elsewhere"}
    assert sum(placed.values()) == sum(p.nbytes for p in held.parameters())
    assert (spread.device.type, spread.config) == ("cpu", held.config)
    torch.testing.assert_close(spread.final_gain(), held.final_gain())
    pairs = [(target, "The quick", load_drafter(drafter_path, target)) for target in (spread, held)]
    for how in ({}, {"temperature": 0.9, "seed": 3}):
        texts = [generate(*pair, max_new_tokens=16, **how).rows[0].tokens for pair in pairs]
        assert texts[0] == texts[1]


def test_a_word_of_accelerate_is_taken(target_path):
    assert load_target(target_path, device_map="auto").device.type == "cpu"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"device_map": "somewhere"}, r"device_map must be auto, .* or a \.json file, got 'somewhere'"),
        ({"device_map": "nowhere.json"}, "no such device map file: nowhere.json"),
        ({"device_map": "auto", "tp_plan": "auto"}, "give a tp_plan or a device_map, not both"),
        ({"tp_plan": "manual"}, "tp_plan must be auto, or not given, got 'manual'"),
    ],
)
def test_mistakes_are_reported(target_path, how, message):
    with pytest.raises(ValueError, match=message):
        load_target(target_path, **how)
