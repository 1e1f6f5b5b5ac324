"""The files of a checkpoint: shards, pickles, the hub's cache, token maps, heads inside a target."""

import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from helpers import edit_config, edit_tensors, tiny_drafter, tiny_target
from safetensors.torch import load_file, save_file

from specdec.drafters import eagle3
from specdec.drafters.formats import load_drafter, open_checkpoint, save_drafter
from specdec.drafters.formats.convert import convert
from specdec.drafters.formats.description import inspect
from specdec.drafters.formats.maps import read_token_map
from specdec.drafters.vocab import DraftVocab


@pytest.fixture
def target():
    return tiny_target()


@pytest.fixture
def folder(target, tmp_path):
    """An EAGLE-3 drafter in one safetensors file."""
    save_drafter(tiny_drafter(target, draft_vocab=8), tmp_path / "draft", target)
    return tmp_path / "draft"


@pytest.mark.parametrize(
    ("name", "shards"),
    [("model.safetensors", True), ("pytorch_model.bin", False), ("pytorch_model.bin", True), ("head.pt", False)],
)
def test_shards_and_pickles_hold_the_same(name, shards, folder, target):
    original = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    write = save_file if "safetensors" in name else torch.save
    if shards:
        index = {key: name.replace(".", f"-0000{1 + i % 2}-of-00002.") for i, key in enumerate(sorted(original))}
        for shard in set(index.values()):
            write({key: original[key] for key in original if index[key] == shard}, folder / shard)
        (folder / f"{name}.index.json").write_text(json.dumps({"weight_map": index}))
    else:
        write(original, folder / name)
    torch.save([1, 2, 3], folder / "freq_3.pt")  # an FR-Spec map in the folder of the weights is no weight
    load_drafter(folder, target)
    torch.testing.assert_close(dict(open_checkpoint(folder).tensors), original, rtol=0, atol=0)
    headers = open_checkpoint(folder, headers=True).tensors
    assert {n: (t.shape, t.dtype) for n, t in headers.items()} == {n: (t.shape, t.dtype) for n, t in original.items()}


def test_a_tensor_that_two_files_hold_is_an_error(folder, target):
    (folder / "model.safetensors").rename(folder / "head.safetensors")
    save_file({"norm.weight": torch.ones(32)}, folder / "old.safetensors")
    with pytest.raises(ValueError, match=r"norm.weight is there twice"):
        load_drafter(folder, target)


def test_a_hub_name_is_found_in_the_cache_without_a_network(folder, target, tmp_path, monkeypatch):
    repository = tmp_path / "cache" / "models--somebody--drafter"
    snapshot = repository / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    snapshot.parent.mkdir(parents=True)
    folder.rename(snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    assert inspect("somebody/drafter")["problems"] == []
    assert load_drafter("somebody/drafter", target).vocab.size == 8


# Token maps (FR-Spec)


@pytest.mark.parametrize("suffix", [".pt", ".json"])
def test_a_token_map_keeps_its_order_and_drops_repetitions(suffix, tmp_path):
    path = tmp_path / f"freq_4{suffix}"
    ids = [7, 3, 16, 3, 0, 7]  # FR-Spec's script adds the end-of-sequence token once more
    torch.save(ids, path) if suffix == ".pt" else path.write_text(json.dumps(ids))
    assert read_token_map(path, 17).ids.tolist() == [7, 3, 16, 0]
    with pytest.raises(ValueError, match="holds token 16"):
        read_token_map(path, 16)


def test_a_drafter_proposes_the_tokens_of_its_map_only(folder, target, tmp_path):
    (tmp_path / "map.json").write_text("[6, 5, 2, 4]")
    drafter = load_drafter(folder, target, token_map=tmp_path / "map.json")
    assert drafter.vocab.ids.tolist() == [6, 2, 4]  # 5 is not in its own vocabulary
    full = load_drafter(folder, target)
    assert torch.equal(drafter.head.weight, full.head.weight[torch.tensor([3, 1, 2])])


# MTP heads inside a target's checkpoint


def test_heads_inside_a_target_are_found_among_its_weights(target, tmp_path):
    made = tiny_drafter(target, kind="mtp-pre-norm-feedback")
    save_drafter(made, tmp_path / "alone", target)
    inside = Path(shutil.copytree(tmp_path / "alone", tmp_path / "inside"))
    edit_config(inside, "mtp", num_hidden_layers=target.config.layers)
    others = {"model.embed_tokens.weight": target.embed.weight, "model.layers.0.mlp.up_proj.weight": torch.ones(2, 2)}
    edit_tensors(inside, **others)
    drafter = load_drafter(inside, target, feedback="pre")
    assert drafter.switches == made.switches
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), drafter.parameters(), strict=True))
    assert drafter.conventions["feedback"] == "the hidden state before the final norm"
    assert load_drafter(inside, target).switches.feedback == "post"
    with pytest.raises(ValueError, match="its own config says"):
        load_drafter(tmp_path / "alone", target, feedback="pre")


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "eagle"])
def test_int8_weights_are_those_that_decoding_in_int8_rounds_to(kind, tmp_path):
    target = tiny_target()
    drafter = tiny_drafter(target, kind=kind)
    save_drafter(drafter, tmp_path / "whole", target)
    layout = open_checkpoint(tmp_path / "whole").layout.name
    convert(tmp_path / "whole", tmp_path / "small", layout, int8=True)
    raw = load_file(tmp_path / "small" / "model.safetensors")
    read = load_drafter(tmp_path / "small", target).state_dict()
    stored, rounded = load_file(tmp_path / "whole" / "model.safetensors"), 0
    for name in (name for name in stored if raw[name].dtype == torch.int8):
        step = stored[name].abs().amax(1, keepdim=True) / 127
        torch.testing.assert_close(raw[name] * step, (stored[name] / step).round() * step)
        rounded += 1
    assert rounded >= 4
    for name, value in drafter.state_dict().items():
        step = value.abs().amax(1, keepdim=True) / 127 if value.ndim == 2 else 0
        assert ((read[name] - value).abs() <= 0.5001 * step + 1e-7).all(), name
    convert(tmp_path / "small", tmp_path / "again", layout, int8=True)
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(again[name], value) for name, value in raw.items() if value.dtype == torch.int8)


def test_a_frozen_head_over_some_tokens_is_not_in_the_file(tmp_path):
    target = tiny_target()
    few = DraftVocab(target.vocab, torch.arange(0, target.vocab, 2))
    drafter = eagle3.create(target, vocab=few, taps=(1, 2, target.config.layers), train_head=False)
    save_drafter(drafter, tmp_path / "head", target)
    assert "lm_head.weight" not in load_file(tmp_path / "head" / "model.safetensors")
    read = load_drafter(tmp_path / "head", target)
    assert torch.equal(read.head.weight, target.head.weight[few.ids])
    assert torch.equal(read.vocab.ids, few.ids)
    edit_config(tmp_path / "head", target_head=False)
    with pytest.raises(ValueError, match=r"lacks the tensor lm_head\.weight"):
        load_drafter(tmp_path / "head", target)
