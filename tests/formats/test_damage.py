"""What is wrong with a checkpoint is named: whatever loading refuses, `inspect` lists as a problem."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from helpers import main_of, run_here, save_hf, tiny_drafter, tiny_target
from published import CONFIG, H, V, edited, make_target, mtp_shapes, permuted, publish, random_tensors, without, written

from specdec.drafters.formats import load_drafter, open_checkpoint
from specdec.drafters.formats.convert import convert
from specdec.drafters.formats.description import as_text, inspect
from specdec.model.checkpoint import nonfinite, read_tensors
from specdec.model.loader import load_target

NAN, INF = float("nan"), float("inf")


def put(name, value):
    return edited(name, lambda tensor: tensor.flatten().index_fill(0, torch.tensor(3), value).view_as(tensor))


# what is wrong -> case, change of the tensors, change of the config, words that name it
DAMAGE = {
    "a tensor is missing": ("EAGLE", lambda t: t.pop("norm.weight"), {}, "norm.weight is missing"),
    "a tensor is left over": ("EAGLE", lambda t: t.update(more=torch.ones(2)), {}, "more is left over"),
    "a map where there is none": (
        "EAGLE-2 of Llama 3", lambda t: t.update(d2t=torch.zeros(V, dtype=torch.int64)), {}, "d2t is left over"
    ),
    "a shape": ("EAGLE", edited("norm.weight", lambda t: t[:-1]), {}, "norm.weight has shape"),
    "whole numbers": ("EAGLE", edited("norm.weight", lambda t: t.to(torch.int8)), {}, "norm.weight holds whole"),
    "NaN": ("EAGLE", put("fc.weight", NAN), {}, "fc.weight holds 1 NaN among"),
    "Inf": ("EAGLE-2 of Llama 2", put("fc.bias", -INF), {}, "fc.bias holds 1 Inf among"),
    "NaN under another name": ("speculators", put("layers.0.hidden_norm.weight", NAN), {}, "layers.0.hidden_norm"),
    "offsets permuted": ("EAGLE", permuted(True), {}, "they have been permuted"),
    "target ids": ("ModelOpt", edited("d2t", lambda t: t + torch.arange(len(t))), {}, "they look like target ids"),
    "a map in bf16": ("EAGLE", edited("d2t", lambda t: t.bfloat16()), {}, "d2t holds numbers of torch.bfloat16"),
    "a map of another target": ("EAGLE", edited("t2d", lambda t: t[:-1]), {}, "t2d speaks of 39 tokens"),
    "no rope": ("EAGLE", None, {"rope_theta": 0}, "rope_theta is 0"),
    "no rope, nested": (
        "speculators", None, {"transformer_layer_config": CONFIG | {"model_type": "llama", "rope_theta": 0.0}},
        "rope_theta is 0",
    ),
    "a negative rope": ("EAGLE-2 of Llama 3", None, {"rope_theta": -1.0}, "rope_theta is -1"),
    "eps": ("EAGLE", None, {"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05"),
    "context": ("EAGLE", None, {"max_position_embeddings": 0}, "max_position_embeddings is 0"),
    "too few taps": ("EAGLE", None, {"taps": [2, 4]}, "2 taps of 32 give 64"),
    "a tap below 0": ("EAGLE", None, {"taps": [-1, 2, 4]}, "below 0"),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGE)
def test_what_does_not_load_is_listed_as_a_problem(tmp_path, what):
    case, change, config, words = DAMAGE[what]
    folder = publish(tmp_path / "it", case, change, **config)
    with pytest.raises(ValueError, match=r".") as refusal:
        load_drafter(folder, make_target())
    assert "\n" not in str(refusal.value)
    report = inspect(folder)
    assert any(words in problem for problem in report["problems"])
    assert "none found" not in as_text(report)


def test_tokens_out_of_order_are_a_doubt_and_an_embedding_that_is_not_read_may_hold_anything(tmp_path):
    """Exporters have been seen to leave one unfilled."""

    def change(tensors):
        permuted(False)(tensors)
        tensors["embed_tokens.weight"] = torch.full((V, 32), NAN)

    folder = publish(tmp_path / "it", "EAGLE", change)
    with pytest.warns(UserWarning, match="not in ascending order"):
        drafter = load_drafter(folder, make_target())
    assert drafter.conventions["embedding"] == "the target's, not the file's"
    report = inspect(folder)
    assert report["problems"] == []
    assert "not in ascending order" in report["doubts"]
    assert as_text(report).endswith("see the doubts")


def test_acceptance_that_cannot_be_read_is_a_problem(tmp_path):
    folder = publish(tmp_path / "it", "EAGLE")
    (folder / "acceptance.json").write_text("{")
    with pytest.raises(ValueError, match="acceptance"):
        load_drafter(folder, make_target())
    assert "acceptance" in inspect(folder)["problems"][0]


def test_of_a_recipe_only_the_target_knows_the_tensors(tmp_path):
    target = tiny_target()
    drafter = tiny_drafter(target)
    config = {"recipe": {"_target_": "specdec.drafters.eagle3.create"}, "vocab_size": 17, "hidden_size": 32}
    folder = written(tmp_path / "it", config, {k: v.detach().clone() for k, v in drafter.named_parameters()})
    assert "only the target can tell" in as_text(inspect(folder))


# NaN and Inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_nan_and_inf_are_counted_and_large_numbers_are_not(dtype):
    tensor = torch.full((64, 2048), 400.0, dtype=dtype)  # in fp16 the sum overflows
    assert nonfinite("x", tensor) == ""
    tensor.view(-1)[7] = NAN
    assert nonfinite("x", tensor) == "x holds 1 NaN among 131072 values"
    if dtype.itemsize > 1:
        tensor.view(-1)[8:10] = torch.tensor([INF, -INF])
        assert nonfinite("x", tensor) == "x holds 1 NaN and 2 Inf among 131072 values"
    assert nonfinite("x", torch.arange(4)) == ""


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_a_target_with_nan_is_refused_unless_allowed(tmp_path, family, capfd):
    model = save_hf(tmp_path / "good", family)
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if "layers.1" in name and p.ndim == 2)[0, 0] = NAN
    model.save_pretrained(tmp_path / "bad")
    load_target(tmp_path / "good", tokenizer=False)
    with pytest.raises(ValueError, match=r"layers.1.*holds 1 NaN among .*--allow-nonfinite"):
        load_target(tmp_path / "bad", tokenizer=False)
    if family == "llama":  # of transformers' own modules the trees are compared with the text, which NaN does not pass
        load_target(tmp_path / "bad", tokenizer=False, allow_nonfinite=True)
    capfd.readouterr()  # notes of what transformers' modules decode


def test_a_drafter_with_nan_is_refused_unless_allowed(drafter_path, target_path, tmp_path):
    folder = publish(tmp_path / "it", "EAGLE", put("fc.weight", NAN))
    with pytest.raises(ValueError, match=r"fc.weight holds 1 NaN among 3072 values; .*--allow-nonfinite"):
        load_drafter(folder, make_target())
    drafter = load_drafter(folder, make_target(), allow_nonfinite=True)
    assert drafter.fc.weight.isnan().sum() == 1
    with pytest.raises(ValueError, match="cannot be converted"):
        convert(folder, tmp_path / "there", "eagle3")
    tensors = dict(read_tensors(drafter_path))
    put("fc.weight", NAN)(tensors)
    folder = written(tmp_path / "bad", json.loads((drafter_path / "config.json").read_text()), tensors)
    words = ["--target", str(target_path), "--draft", str(folder), "--prompt", "The", "--max-new-tokens", "2", "--raw"]
    done = run_here(main_of("generate"), *words)
    assert (done.returncode, "fc.weight holds 1 NaN" in done.stderr) == (2, True)
    assert run_here(main_of("generate"), *words, "--allow-nonfinite").returncode == 0


def test_a_file_that_may_not_be_read_is_not_called_missing(drafter_path, monkeypatch):
    monkeypatch.setattr(Path, "open", Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(ValueError, match=r"^cannot read .*/model.safetensors: Permission denied$"):
        dict(read_tensors(drafter_path))


def test_no_weights_are_kept_to_inspect_a_checkpoint(tmp_path):
    """Whatever its size."""
    checkpoint = open_checkpoint(publish(tmp_path / "it", "EAGLE"), headers=True)
    assert {name for name, tensor in checkpoint.tensors.items() if not tensor.is_meta} == {"d2t", "t2d"}


def test_an_mtp_head_inside_a_target_is_inspected(tmp_path):
    at, config = "model.mtp_layers.0", CONFIG | {"num_hidden_layers": 8}
    tensors = random_tensors(mtp_shapes(at) | {"model.embed_tokens.weight": (V, H)})
    assert inspect(written(tmp_path / "whole", config, tensors))["problems"] == []
    for name, words in (
        (f"{at}.mlp.up_proj.weight", "is missing"),
        (f"{at}.self_attn.q_proj.weight", "is missing"),
    ):
        folder = written(tmp_path / name, config, without(tensors, name))
        assert words in inspect(folder)["problems"][0]
        with pytest.raises(ValueError, match=name):
            load_drafter(folder, make_target())
