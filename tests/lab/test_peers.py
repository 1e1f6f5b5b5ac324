"""Other engines in the benchmark: what is written for them, what they are not given, and, where they are installed
(`pip install 'specdec[peers]'`), that they decode the target's text."""

import subprocess
import sys
import tempfile
import time
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from helpers import is_running, random_model, tiny_target
from number_reader import Reader

from specdec.engine.memory import weight_bytes
from specdec.lab.bench import peer_sessions
from specdec.lab.bench.bench import compare_texts
from specdec.lab.bench.contenders import Contender, NotAvailable, Ours, read_bytes
from specdec.lab.bench.peer_weights import copy_gguf, finish, write_gguf
from specdec.lab.bench.peers import LlamaCpp, Peer, peers_by_name
from specdec.model.loader import load_target
from specdec.model.rope import Rope
from specdec.model.target import Target
from specdec.structs import Sampling

ENGINES = {"ctranslate2": "ctranslate2", "llama.cpp": "xllamacpp", "llama.cpp-fp16": "xllamacpp"}
LLAMA3 = Rope(10000.0, "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=32)
GEMMA3 = {
    "layers": 7, "qk_norm": True, "norm_offset": True, "sandwich_norms": True, "activation": "gelu_tanh",
    "attention_scale": 8**-0.5, "embed_scale": 32**0.5, "rope": Rope(1e6), "local_rope": Rope(1000.0),
    "sliding": (True,) * 5 + (False, True), "window": 80,
}  # fmt: skip


# What llama.cpp and CTranslate2 are given. tests/model/test_gguf_target.py reads what is written for llama.cpp.


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"qkv_bias": True, "o_bias": True, "mlp_bias": True}, "llama"),
        ({"rope": LLAMA3}, "llama"),
        ({"qkv_bias": True}, "qwen2"),
        ({"qk_norm": True, "attention_scale": 8**-0.5}, "qwen3"),  # this is the usual scale
        ({"sliding": (True, True, True), "window": 64}, "llama"),  # a window that holds the whole text is none
        ({"sliding": (True, True, True), "window": 63}, "models with sliding and window"),
        ({"logit_softcap": 30.0}, "models with logit_softcap"),
        ({"qk_norm": True, "o_bias": True}, "models with o_bias"),
        ({"qkv_bias": True, "rope": LLAMA3}, "models with rope.llama3"),
        ({"qk_norm": True, "sandwich_norms": True, "sliding": (True, False, True), "window": 8}, "every sixth layer"),
    ],
)
def test_llama_cpps_architectures_and_what_it_is_not_given(changes, name):
    config = replace(tiny_target().config, **changes)
    with pytest.raises(NotAvailable, match=name) if " " in name else nullcontext():
        assert LlamaCpp.architecture(config, 64) == name


# Runs


def test_chunks_of_text_name_the_tokens(monkeypatch):
    chunks = [{"choices": [{"text": text}]} for text in ("<5>", "<0><128255>", "")]
    marks = list(zip((1.0, 3.0, 4.0), map(peer_sessions.tokens_of, chunks), strict=True))
    monkeypatch.setattr(time, "perf_counter", Mock(side_effect=(0.5, 4.5)))
    monkeypatch.setattr(peer_sessions, "_session", lambda request: marks, raising=False)
    assert peer_sessions.decode({}) == ([5, 0, 128255], 4.0, 0.5, [2.0, 0.0])
    with pytest.raises(RuntimeError, match="too long"):
        peer_sessions.tokens_of({"code": 400, "message": "too long"})


class Engine(Peer):
    engine, modules = "Engine", ("json",)


def test_weights_and_cache_count_in_their_own_width():
    target = tiny_target()
    full, half = (Engine(target, 64, dtype) for dtype in (torch.float32, torch.float16))
    assert full.moved(target, 10) == read_bytes(target, 10, packed=False) == 2 * half.moved(target, 10)
    assert full.weights == weight_bytes(target) == 2 * half.weights


def test_an_engine_in_a_process_of_its_own(tmp_path, monkeypatch):
    """Its files are removed whatever happens; it continues after an error; the error that ends it is reported."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    peer = Engine(tiny_target(), 64, torch.float32)
    with pytest.raises(ZeroDivisionError):
        peer.load(lambda folder: 1 / 0, Reader, name="a")
    assert list(tmp_path.iterdir()) == []
    peer.load(lambda folder: (folder / "a").write_text("7"), Reader, name="a")
    assert list(tmp_path.iterdir()) == []
    run = peer.ask({"add": 2}, 1)  # the session has what it read
    assert (run.tokens, run.steps, run.cache_bytes) == ([9], [], 2 * 3 * 2 * 8 * 4)
    assert 0 < run.prefill_seconds <= run.seconds
    with pytest.raises(TypeError):
        peer.ask({"add": "text"}, 1)
    assert peer.ask({"add": 1}, 1).tokens == [8]
    with pytest.raises(BrokenProcessPool):
        peer.ask({"exit": 3}, 1)


ORPHAN = """
import os, sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from specdec.lab.bench import peer_sessions
if __name__ == "__main__":
    pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=peer_sessions.end_with_parent)
    pool.submit(int).result()
    print(*pool._processes, "torch" in sys.modules, flush=True)
    os.kill(os.getpid(), 9)
"""


def test_the_process_of_an_engine_ends_with_ours_and_does_without_torch(tmp_path):
    (tmp_path / "orphan.py").write_text(ORPHAN)
    done = subprocess.run([sys.executable, tmp_path / "orphan.py"], capture_output=True, text=True, check=False)
    number, torch_is_there = done.stdout.split()
    assert (done.returncode, torch_is_there) == (-9, "False")
    deadline = time.monotonic() + 20
    while is_running(number):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_where_texts_part_and_how_far_the_logits_are_apart():
    target, prompt = tiny_target(), [3, 1, 4]
    with torch.inference_mode():
        logits, _ = target(torch.tensor([[*prompt, 5]]), None)
    gap = pytest.approx((logits[0, -1, 6] - logits[0, -1, 7]).item(), abs=1e-5)
    texts = [(prompt, [5, 7, 8], [5, 6, 9]), (prompt, [5, 6, 9], [5, 6, 9])]
    out = compare_texts(target, texts)
    assert (out["same_text_as_plain"], out["differences"]) == ("1 of 2", [{"text": 0, "token": 1, "logit_gap": gap}])
    assert "logit_gap" not in compare_texts(target, texts, gaps=False)["differences"][0]
    assert compare_texts(target, texts[1:]) == {"same_text_as_plain": "1 of 1"}


def test_what_is_not_installed_is_not_available(monkeypatch):
    target, missing = tiny_target(), {"ctranslate2": "ctranslate2", "llama.cpp": "xllamacpp", "llama.cpp-fp16": "gguf"}
    for name, module in missing.items():
        for engine in missing.values():  # as if only this one were not there
            monkeypatch.setitem(sys.modules, engine, None if engine == module else tempfile)
        with pytest.raises(NotAvailable, match=r"^(CTranslate2|llama.cpp) cannot be imported .*'specdec\[peers\]'$"):
            peers_by_name(target, 64)[name]()


@pytest.mark.parametrize("name", ENGINES)
def test_targets_that_no_peer_is_given(target_path, name):
    with pytest.raises(NotAvailable, match="native targets only"):
        peers_by_name(load_target(target_path, generic=True), 64)[name]()
    with pytest.raises(NotAvailable, match="on the CPU only, the target is on meta"):
        peers_by_name(tiny_target().to("meta"), 64)[name]()


def test_a_copied_gguf_file_has_the_same_tensors_and_numbered_tokens(tmp_path):
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_block_count(2)
    writer.add_array("llama.numbers", [3, 5])
    writer.add_tokenizer_model("gpt2")
    written = {"plain": np.ones((3, 32), np.float32), "packed": gguf.quantize(np.ones((4, 32), np.float32), kind.Q4_1)}
    writer.add_tensor("plain", written["plain"])
    writer.add_tensor("packed", written["packed"], raw_dtype=kind.Q4_1)
    finish(writer)
    copy_gguf(tmp_path / "b.gguf", tmp_path / "a.gguf", vocab=4)
    read = gguf.GGUFReader(tmp_path / "b.gguf")
    assert {x.name: x.tensor_type for x in read.tensors} == {"plain": kind.F32, "packed": kind.Q4_1}
    assert all(np.array_equal(x.data, written[x.name]) for x in read.tensors)
    fields = {name: field.contents() for name, field in read.fields.items()}
    assert (fields["general.architecture"], fields["llama.block_count"]) == ("llama", 2)
    assert (fields["llama.numbers"], fields["tokenizer.ggml.model"]) == ([3, 5], "rwkv")
    assert fields["tokenizer.ggml.tokens"] == ["<0>", "<1>", "<2>", "<3>"]


# The engines themselves, where they are installed


MODELS = {
    "llama": {},
    "tied": {"tied": True},
    "biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "no-groups": {"kv_heads": 4},
    "wide-heads": {"head_dim": 16},
    "linear": {"rope": Rope(10000.0, "linear", factor=4.0)},
    "llama3": {"rope": LLAMA3},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True, "head_dim": 16},
    "gemma3": GEMMA3,
}
# What rounding may move a logit by, of the largest: some tens of roundings of fp32; some of fp16, as llama.cpp's cache.
ROUNDING = {"ctranslate2": 1e-5, "llama.cpp": 8e-3, "llama.cpp-fp16": 8e-3}
PROMPTS = [torch.randint(99, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in range(1, 65)]
NEW = 3


def target_of(**changes) -> Target:
    """As `tiny_target`, but for these fields of its config. Norms and biases are random too, so that none is forgotten,
    and tied weights are small, or every token would be followed by itself."""
    torch.manual_seed(0)
    target = random_model(replace(tiny_target(vocab=99).config, **changes))
    with torch.no_grad():
        for parameter in (p for p in target.parameters() if p.ndim == 1):
            parameter.add_(torch.randn_like(parameter) * 0.3)
        if target.config.tied:
            target.head.weight = target.embed.weight
            target.embed.weight.mul_(0.1)
    return target


def largest_gap(target, contender: Contender) -> float:
    """Of the target's logits, where the contender's texts are not plain decoding's; 0 if all are."""
    ours = [Ours(target)(p, NEW, Sampling(), 0).tokens for p in PROMPTS]
    assert len({token for text in ours for token in text}) > 25, "the texts are too much alike to tell models apart"
    texts = [(p, contender(p, NEW, Sampling(), 0).tokens, plain) for p, plain in zip(PROMPTS, ours, strict=True)]
    return max((d["logit_gap"] for d in compare_texts(target, texts).get("differences", [])), default=0.0)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("model", MODELS)
def test_an_engine_decodes_the_targets_text(name, model, tmp_path, monkeypatch):
    """Its texts are ours but where the target's logits are equal up to the rounding of its arithmetic."""
    pytest.importorskip(ENGINES[name])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    target = target_of(**MODELS[model])
    with torch.inference_mode():
        largest = max(target(torch.tensor([p]), None)[0].abs().max().item() for p in PROMPTS[-5:])
    contender = peers_by_name(target, 64 + NEW)[name]()
    assert list(tmp_path.iterdir()) == []
    assert largest_gap(target, contender) <= ROUNDING[name] * largest
    run = contender(PROMPTS[4], 40, Sampling(), 0)
    assert (len(run.tokens), len(run.steps)) == (40, 39)
    assert 0 < run.prefill_seconds + sum(run.steps) <= run.seconds
    assert run.cache_bytes >= (5 + 39) * contender.values * contender.cache_dtype.itemsize
    assert "engine" in contender.details()


def test_llama_cpp_decodes_the_targets_own_file_also_with_its_own_drafts(tmp_path):
    pytest.importorskip("xllamacpp")
    target, file = target_of(), tmp_path / "a.gguf"
    write_gguf(file, target, "llama", torch.float16)
    makers = peers_by_name(target, 300, file)
    texts = {name: makers[name]() for name in ("llama.cpp-fp16", "llama.cpp-file", "llama.cpp-ngram")}
    run = {name: contender(PROMPTS[4], 200, Sampling(), 0) for name, contender in texts.items()}
    assert run["llama.cpp-fp16"].tokens == run["llama.cpp-file"].tokens == run["llama.cpp-ngram"].tokens
    assert [contender.drafts for contender in texts.values()] == [False, False, True]
    assert texts["llama.cpp-file"].weights == file.stat().st_size
    with pytest.raises(NotAvailable, match="not read from a GGUF file"):
        peers_by_name(target, 300)["llama.cpp-file"]()


@pytest.mark.parametrize("name", ["ctranslate2", "llama.cpp"])
def test_sampling_is_meant_as_ours(name):
    """The first token is drawn as ours is: of the tokens that top-k and top-p leave, with their shares."""
    pytest.importorskip(ENGINES[name])
    target, sampling, draws = tiny_target(), Sampling(0.8, 6, 0.9), 400
    counts = []
    for contender in (peers_by_name(target, 100)[name](), Ours(target)):
        drawn = [contender([1, 2, 3], 1, sampling, seed).tokens[0] for seed in range(draws)]
        counts.append(torch.bincount(torch.tensor(drawn), minlength=17))
    theirs, ours = counts
    assert 2 < (ours > 0).sum() <= 6
    assert torch.equal(theirs > 0, ours > 0)
    # The difference of two counts of probability p has a deviation of sqrt(2 n p (1 - p)), at most sqrt(n / 2).
    assert (theirs - ours).abs().max() < 5 * (draws / 2) ** 0.5


def test_a_repetition_penalty_is_ours_or_refused():
    pytest.importorskip("xllamacpp")
    target, penalty = tiny_target(vocab=60), Sampling(repetition_penalty=1.7)
    prompt = [t % 60 for t in PROMPTS[8]]
    contender = peers_by_name(target, 100)["llama.cpp"]()
    text = contender(prompt, 25, penalty, 0).tokens
    assert text == Ours(target)(prompt, 25, penalty, 0).tokens
    assert text != contender(prompt, 25, Sampling(), 0).tokens
    pytest.importorskip("ctranslate2")
    with pytest.raises(NotAvailable, match="CTranslate2 has no repetition_penalty as it is meant here"):
        peers_by_name(target, 100)["ctranslate2"]()(prompt, 25, penalty, 0)
