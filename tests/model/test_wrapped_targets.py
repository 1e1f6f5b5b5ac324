"""Checkpoints that wrap a language model: the text part loads, and equals the inner model."""

import json

import pytest
import torch
from helpers import edit_config, edit_tensors, save_hf
from safetensors.torch import load_file, save_file
from test_archs import GEMMA3_TEXT

from specdec.model.hf_target import TransformersTarget
from specdec.model.loader import load_target
from specdec.model.target import Target

NAMINGS = {
    "older": ("language_model.model.", "language_model.lm_head."),
    "newer": ("model.language_model.", "lm_head."),
    "unprefixed": ("model.", "lm_head."),
}
FAMILIES = {  # the class, the outer family, and fields
    "llama": (Target, "llava", {}),
    "olmo2": (TransformersTarget, "llava", {}),
    "gemma3_text": (Target, "gemma3", GEMMA3_TEXT),
}


def wrap(inner, folder, naming: str, **outer) -> None:
    """Write the checkpoint `inner` as the text part of one that sees."""
    model, head = NAMINGS[naming]
    tensors = {
        name.replace("model.", model, 1).replace("lm_head.", head, 1): value
        for name, value in load_file(inner / "model.safetensors").items()
    }
    tensors |= {"vision_tower.weight": torch.ones(3), "model.multi_modal_projector.weight": torch.ones(3)}
    text = json.loads((inner / "config.json").read_text())
    config = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "text_config": text} | outer
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("naming", NAMINGS)
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_the_text_part_equals_the_inner_model(family, naming, tmp_path, capsys):
    kind, outer, fields = FAMILIES[family]
    model = save_hf(tmp_path / "inner", family, **fields)
    edit_config(tmp_path / "inner", "hidden_activation")  # released configs leave most text fields out
    wrap(tmp_path / "inner", tmp_path / "whole", naming, model_type=outer)
    target = load_target(tmp_path / "whole", tokenizer=False)
    assert type(target) is kind
    assert "it reads and writes text only" in capsys.readouterr().err
    assert target.eos == {2}
    ids = torch.randint(99, (2, 20))
    alone, _ = load_target(tmp_path / "inner", tokenizer=False)(ids, None)
    logits, _ = target(ids, None)
    assert torch.equal(logits, alone)
    torch.testing.assert_close(logits, model(ids).logits, rtol=0, atol=1e-4)
    extra = f"{NAMINGS[naming][0]}layers.0.extra"
    edit_tensors(tmp_path / "whole", **{extra: torch.ones(1)})
    with pytest.raises(ValueError, match=f"holds the tensor {extra}"):
        load_target(tmp_path / "whole", tokenizer=False)


def test_the_outer_config_says_whether_the_head_is_tied(tmp_path):
    save_hf(tmp_path / "inner", "llama")
    wrap(tmp_path / "inner", tmp_path / "whole", "older", tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from the embedding"):
        load_target(tmp_path / "whole", tokenizer=False)
