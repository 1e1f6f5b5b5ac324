"""Folders with several weight files, as people have them: those that transformers reads are read here."""

import io
import json
import os
import pickle

import pytest
import torch
from helpers import save_hf
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from specdec import Engine, load_target
from specdec.api import generate
from specdec.model.checkpoint import check_device, read_pickle
from specdec.model.config_fields import ends_of
from specdec.model.weight_files import weight_files

PROMPT = [5, 9, 30, 7]
FORMS = {
    "model.safetensors": (save_file, "model.safetensors"),
    "model.safetensors.index.json": (save_file, "model-00001-of-00001.safetensors"),
    "pytorch_model.bin": (torch.save, "pytorch_model.bin"),
    "pytorch_model.bin.index.json": (torch.save, "pytorch_model-00001-of-00001.bin"),
}
OTHERS = ("consolidated.safetensors", "adapter_model.safetensors", "training_args.bin", "optimizer.pt")


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    save_hf(folder, "llama")
    return folder, load_file(folder / "model.safetensors")


@pytest.mark.parametrize("there", range(1, 16))
def test_of_several_files_those_are_read_that_transformers_reads(weights, tmp_path, there):
    source, tensors = weights
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    generator = torch.Generator().manual_seed(there)
    for place, (name, (save, file)) in enumerate(FORMS.items()):
        if there >> place & 1:
            own = {key: torch.randn(t.shape, generator=generator) * 0.3 for key, t in tensors.items()}
            save(own, tmp_path / file)
            if name.endswith(".json"):
                index = {"metadata": {}, "weight_map": dict.fromkeys(own, file)}
                (tmp_path / name).write_text(json.dumps(index), encoding="utf-8")
    for name in OTHERS:
        save = save_file if name.endswith("safetensors") else torch.save
        save({"other.weight": torch.ones(2, 2)}, tmp_path / name)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ours = load_target(tmp_path, tokenizer=False)
    right = theirs.generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False)[0, len(PROMPT) :].tolist()
    assert Engine(ours).generate([PROMPT], max_new_tokens=8).rows[0].tokens == right


def test_shards_without_an_index_are_all_read(tmp_path):
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "consolidated.safetensors"):
        save_file({name: torch.ones(1)}, tmp_path / name)
    assert [file.name[:11] for file in weight_files(tmp_path)] == ["model-00001", "model-00002"]


def test_ids_without_a_tokenizer_end_in_ids(weights):
    target = load_target(weights[0], tokenizer=False)
    made = generate(target, [PROMPT], max_new_tokens=4)
    assert (made.text, len(made.rows[0].tokens)) == ([""], 4)
    for how in ({"stop": "x"}, {"json_schema": {}}):
        with pytest.raises(ValueError, match="tokenizer"):
            generate(target, [PROMPT], max_new_tokens=4, **how)


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"repetition_penalty": 1.6}, "repetition_penalty=1.6"),
        ({"suppress_tokens": [3]}, "suppress_tokens=[3]"),
        ({"do_sample": True, "temperature": 0.6}, "do_sample=True, temperature=0.6"),
        ({"temperature": 0.6, "top_p": 0.9}, ""),  # transformers does not sample either
        ({"repetition_penalty": 1.0, "num_beams": 1, "suppress_tokens": None}, ""),
    ],
)
def test_what_generation_config_asks_for_and_is_left_out_is_named(weights, tmp_path, capsys, said, named):
    for file in weights[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 1} | said), encoding="utf-8")
    load_target(tmp_path, tokenizer=False)
    printed = capsys.readouterr().err
    assert named in printed
    assert bool(printed) == bool(named)


def test_an_end_that_is_null_outside_is_that_of_the_text():
    assert ends_of({"eos_token_id": None, "text_config": {"eos_token_id": 3}}) == [3]
    assert ends_of({"eos_token_id": [5, 6], "text_config": {"eos_token_id": 3}}) == [5, 6]


def pickled(value) -> bytes:
    held = io.BytesIO()
    torch.save(value, held)
    return held.getvalue()


PICKLES = {
    "empty": b"",
    "cut short": pickled({"a": torch.ones(50)})[:200],
    "no pickle": b"weights",
    "of Python's own": pickle.dumps({"a": 1}),
    "sparse": pickled({"a": torch.ones(2, 2).to_sparse()}),
    "named by numbers": pickled({1: torch.ones(2)}),
    "a list": pickled([torch.ones(2)]),
    "a tensor": pickled(torch.ones(2)),
}


@pytest.mark.parametrize("content", PICKLES)
def test_a_damaged_pickle_is_one_sentence(weights, tmp_path, content):
    (tmp_path / "config.json").write_bytes((weights[0] / "config.json").read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(PICKLES[content])
    with pytest.raises(ValueError, match=r"pytorch_model\.bin") as error:
        load_target(tmp_path, tokenizer=False)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400 + len(str(tmp_path))


def test_a_pipe_is_no_weights(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="no regular file"):
        weight_files(tmp_path)
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        read_pickle(tmp_path / "none.pt")


@pytest.mark.parametrize("device", ["meta", "mps", "cuda:99", "nowhere", "x" * 500, ""])
def test_a_device_that_cannot_be_used_is_a_short_sentence(device):
    with pytest.raises(ValueError, match="cannot be used here") as error:
        check_device(device)
    assert len(str(error.value)) < 300
