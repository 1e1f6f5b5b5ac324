"""Features from files of hidden states as vLLM writes them. A stand-in writes them here, from transformers' modules:
the inputs of the layers, and the output of the last one."""

import itertools
import json
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType, SimpleNamespace

import helpers
import pytest
import torch
from helpers import main_of
from remotes import small_server
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from short_runs import composed, logged, refused
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from specdec.engine.engine import Engine
from specdec.model.ends import every_token
from specdec.model.loader import load_target
from specdec.training import cache, estimate, train
from specdec.training.data import load_samples

LAYERS = [0, 1, 2, 3]  # all of the target, as vLLM counts them


class StandIn:
    """Writes what vLLM would, for token ids."""

    def __init__(self, target_path, folder):
        logging.disable_progress_bar()
        self.model = AutoModelForCausalLM.from_pretrained(target_path, dtype=torch.float32)
        self.folder, self.inputs = folder, []
        for layer in [*self.model.model.layers, self.model.model.norm]:
            layer.register_forward_pre_hook(lambda _, args, kwargs: self.inputs.append((*args, *kwargs.values())[0]),
                                            with_kwargs=True)  # fmt: skip

    @torch.no_grad()
    def write(self, ids, layers=LAYERS, stated=True, says=None, end=None):
        self.inputs.clear()
        logits = self.model(torch.tensor([list(ids)])).logits[0, -1]
        states = torch.stack([self.inputs[layer][0, :end] for layer in layers], 1)
        names = {"of_layers": "num_hidden_layers", "hidden": "hidden_size", "vocab": "vocab_size"}
        about = {key: getattr(self.model.config, name) for key, name in names.items()}
        about |= {"layers": layers, "next_token": logits.argmax().item(), "model": "the stand-in's"}
        path = self.folder / f"cmpl-{len(list(self.folder.iterdir()))}.safetensors"
        tensors = {"hidden_states": states, "token_ids": torch.tensor(list(ids))}
        save_file(tensors, path, {"specdec": json.dumps(about | (says or {}))} if stated else None)
        return path


@pytest.fixture(scope="module")
def where(where) -> tuple[str, ...]:
    """Fewer conversations than others take."""
    return *where, "data.limit=24"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "states").mkdir()
    return tmp_path / "states"


@pytest.fixture(scope="module")
def ids(where, target_path):
    """Of every conversation."""
    return [s.ids for s in load_samples(composed("cache", *where).data, load_target(target_path))]


def stored(where, out, *words) -> dict:
    """What the command stores with these settings."""
    cache.run(composed("cache", *where, "store=fp32", f"out={out}", *words))
    (path,) = out.glob("features-*.safetensors")
    return load_file(path)


def test_features_and_training_are_those_of_the_target_here(where, target_path, ids, folder, tmp_path, capsys):
    """The layers do not run: only the target's ends are loaded, and with those a drafter learns the same."""
    stand_in = StandIn(target_path, folder)
    for number, text in enumerate(ids):  # of some more than the text: what follows changes no state
        stand_in.write([*text, 5] if number % 3 == 0 else text)
    stand_in.write(every_token(320).tolist())
    taps = "drafter.taps=[0,1,2]"
    ours = stored(where, tmp_path / "here", taps)
    theirs = stored(where, tmp_path / "there", taps, f"from_vllm={folder}")
    assert ours.keys() == theirs.keys() > {"feats", "hidden"}
    for name, tensor in ours.items():
        room = 1e-4 * tensor.float().abs().max().item() if tensor.is_floating_point() else 0
        torch.testing.assert_close(theirs[name], tensor, rtol=0, atol=room, msg=name)
    runs = {"here": "trainer.prompts=null", "there": "trainer.prompts=null", "ends": "whole_target=false"}
    for name, more in runs.items():
        of = tmp_path / name.replace("ends", "there")
        words = f"data.cache={of}", f"out={tmp_path / 'run' / name}", taps, more
        train.run(composed("train", f"target.path={target_path}", *words))
    assert "tau is not decoded" in capsys.readouterr().err
    for a, b, c in zip(*(logged(tmp_path / "run" / name) for name in runs), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4)
        assert b == c
    estimate.run(composed("train", f"target.path={target_path}", *words))  # of the last one, which has no layers
    said = capsys.readouterr().out
    assert json.loads(said.splitlines()[-1])["cache_seconds"] is None
    assert re.search("time of making a cache .* unknown", said)
    weights = [load_file(tmp_path / "run" / name / "draft" / "model.safetensors") for name in runs]
    assert all(torch.equal(weights[1][name], weights[2][name]) for name in weights[0])


def test_a_server_is_asked_for_what_is_not_there(where, target_path, ids, folder, tmp_path):
    """The most likely tokens in place of the last state; the folder has a third, and a second run asks for nothing."""
    stand_in = StandIn(target_path, folder)
    for text in ids[::3]:
        stand_in.write(text)
    with small_server(Engine(load_target(target_path))) as server:

        def complete(body):
            stand_in.write(body["prompt"])
            return {"choices": [{"text": "", "finish_reason": "length"}]}

        server.complete = complete
        more = f"from_vllm={folder}", f"server={server.url}", "requests=2"
        _, theirs = (stored(where, tmp_path / out, *more, "keep=9") for out in ("one", "two"))
        asked = [tuple(body["prompt"]) for body in server.asked]
    every, there = tuple(every_token(320).tolist()), {tuple(text.tolist()) for text in ids[::3]}
    assert sorted(asked) == sorted({every, *(tuple(text.tolist()) for text in ids)} - there)
    assert {(body["max_tokens"], body["temperature"]) for body in server.asked} == {(1, 0.0)}
    ours = stored(where, tmp_path / "here", "keep=9")
    torch.testing.assert_close(theirs["logp"], ours["logp"], rtol=0, atol=1e-4)
    assert torch.equal(theirs["choice"], ours["choice"])


def test_a_server_that_writes_elsewhere_is_reported(where, target_path, folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("specdec.training.features.vllm_files.WAIT", 0.1)
    with small_server(Engine(load_target(target_path))) as server:
        words = [*where, f"out={tmp_path / 'out'}", f"from_vllm={folder}", f"server={server.url}"]
        said = refused(capsys, cache, *words)
        assert len(server.asked) == 1  # the first shows it
    assert "has answered 1 texts, and" in said
    assert "is it the shared_storage_path of its connector?" in said


def test_files_that_say_nothing_are_read_by_the_servers_layers(where, target_path, ids, folder, tmp_path):
    """Those of vLLM's own connector, in the order of layers for any setting of the server."""
    stand_in = StandIn(target_path, folder)
    for text in ids:
        stand_in.write(text, stated=False)
    more = ["trainer=small", f"out={tmp_path / 'x'}", "--from-vllm", folder]
    said = helpers.refused(main_of("train cache"), *where, "store=fp32", *more)
    assert "does not say which layers it holds: give layer_ids=[...]" in said
    theirs = stored(where, tmp_path / "there", f"from_vllm={folder}", "layer_ids=[3,0,2,1]")["feats"]
    ours = stored(where, tmp_path / "here")["feats"]
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-4 * ours.abs().max().item())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda s, ids: s.write(ids[0], [0, 2, 3]),
            r"holds layers \[0, 2, 3\], and layer 1 is read too: give the server",
        ),
        (lambda s, ids: s.write(ids[0], [0, 1, 2]), r"layer 3 is read too: .*layer_ids \[0, 1, 2, 3\]"),
        (lambda s, ids: s.write(ids[0], says={"hidden": 64}), "is of the stand-in's, with hidden 64, and .* has 48"),
        (lambda s, ids: s.write(ids[0], says={"of_layers": 4}), "with of_layers 4, and .* has 3"),
        (
            lambda s, ids: s.write(ids[0], [0, 1], says={"layers": LAYERS}),
            r"holds 2 states of width 48, and layers \[0, 1, 2, 3\]",
        ),
        (lambda s, ids: s.write(ids[0], says={"layers": ["0"]}), "specdec must be an object whose layers are whole"),
        (
            lambda s, ids: (torch.nn.init.normal_(s.model.lm_head.weight), *map(s.write, ids)),
            "vLLM's next token is not among the 4 likeliest, so in .*: these are another target's states",
        ),
        (lambda s, ids: os.truncate(s.write(ids[0]), 2000), "cmpl-0.safetensors is damaged or cut off: "),
        (lambda s, ids: s.write(ids[0], end=-1), "is not whole: it has states of shape"),
        (
            lambda s, ids: [s.write([*text[:-2], text[-2] + 1, text[-1]]) for text in ids],
            r"has no states of 24 of 24 conversations: of the first one's \d+ token ids the nearest file has",
        ),
        (lambda s, ids: [s.write(text) for text in ids[1:]], "has no states of 1 of 24 conversations"),
        (lambda s, ids: s.folder.rmdir(), "states is no folder"),
        (
            lambda s, ids: (s.model.bfloat16(), s.write(ids[0])),
            "holds bfloat16, and the target is read in float32: set target.dtype",
        ),
    ],
)
def test_wrong_files_are_reported(where, target_path, ids, folder, tmp_path, capsys, wrong, message):
    wrong(StandIn(target_path, folder), ids)
    words = [*where, "drafter.taps=[0,1,2]", f"out={tmp_path / 'out'}", f"from_vllm={folder}"]
    assert re.search(message, refused(capsys, cache, *words))
    assert not list(tmp_path.glob("out/features-*"))


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        (cache, ["server=http://127.0.0.1:1"], "server is for from_vllm=FOLDER, which is not given"),
        (cache, ["layer_ids=[1]"], "layer_ids is for from_vllm=FOLDER, which is not given"),
        (cache, ["from_vllm=x", "layer_ids=5"], "layer_ids must be a list of whole numbers, got 5"),
        (train, ["whole_target=false"], "leaves the target's layers out: give data.cache"),
        (train, ["whole_target=false", "data.cache=x", "trainer.prompts=x"], "decodes nothing: leave out"),
    ],
)
def test_settings_that_do_not_go_together_are_reported(where, tmp_path, capsys, command, words, message):
    assert message in refused(capsys, command, *where, f"out={tmp_path / 'out'}", *words)


# The connector, over a base class that has as much of vLLM's as it asks for


@pytest.fixture
def connector(monkeypatch, tmp_path):
    """The connector's module, and a worker of it whose cache has 6 blocks of 4 tokens, for 3 layers of width 8."""

    @dataclass
    class PendingSave:
        req_id: str
        filename: str
        token_ids: torch.Tensor
        block_ids: list[int]

    class Example:
        def __init__(self, vllm_config, role, kv_cache_config):
            self._vllm_config, self._pending_saves, self._block_size = vllm_config, {}, 4
            self._kv_cache, self._is_tp_rank_zero = kv_cache_config, True
            self._executor = ThreadPoolExecutor(1)

        def request_finished(self, request, block_ids):
            path, ids = str(tmp_path / f"{request.request_id}.safetensors"), torch.tensor(request.prompt)
            self._pending_saves[request.request_id] = PendingSave(request.request_id, path, ids, block_ids)
            return True, {"hidden_states_path": path}

        def has_connector_metadata(self):
            return bool(self._pending_saves)

        def _get_connector_metadata(self):
            saves, self._pending_saves = [*self._pending_saves.values()], {}
            return SimpleNamespace(pending_saves=saves)

    for name in itertools.accumulate(["vllm", "distributed", "kv_transfer", "kv_connector", "v1"], "{}.{}".format):
        monkeypatch.setitem(sys.modules, name, package := ModuleType(name))
    package.example_hidden_states_connector = SimpleNamespace(
        PendingSave=PendingSave, ExampleHiddenStatesConnector=Example, logger=logging.get_logger("vllm")
    )
    monkeypatch.delitem(sys.modules, "specdec.training.vllm_side.hidden_state_files", raising=False)
    module = import_module("specdec.training.vllm_side.hidden_state_files")
    draft = SimpleNamespace(hf_config=SimpleNamespace(eagle_aux_hidden_state_layer_ids=[3, 0, 2]))
    text = SimpleNamespace(num_hidden_layers=3, hidden_size=8, vocab_size=17)
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(draft_model_config=draft),
        model_config=SimpleNamespace(hf_text_config=text, model="big"),
        parallel_config=SimpleNamespace(tensor_parallel_size=2),
    )
    yield module, module.HiddenStateFiles(config, None, torch.randn(6, 3, 4, 8))
    sys.modules.pop("specdec.training.vllm_side.hidden_state_files", None)


def asked(name="a", temperature=0.0, prompt=(5, 6, 7, 8, 9)):
    sampling = SimpleNamespace(temperature=temperature)
    return SimpleNamespace(request_id=name, prompt=list(prompt), all_token_ids=[*prompt, 11], sampling_params=sampling)


def test_the_connector_writes_what_the_blocks_hold(connector, tmp_path):
    _, worker = connector
    worker.request_finished(asked(), [4, 1])
    worker.request_finished(asked("b", temperature=1.0), [0, 2])
    assert worker.get_finished({"a"}) == ({"a"}, None)
    assert worker.get_finished({"b", "never seen"}) == ({"b"}, None)
    assert worker.get_finished(set()) == (None, None)
    worker._executor.shutdown()
    found, pages = load_file(tmp_path / "a.safetensors"), worker._kv_cache
    assert found["token_ids"].tolist() == [5, 6, 7, 8, 9]
    assert torch.equal(found["hidden_states"], torch.cat([pages[4].transpose(0, 1), pages[1].transpose(0, 1)[:1]]))
    says = []
    for name in "ab":
        with safe_open(tmp_path / f"{name}.safetensors", framework="pt") as file:
            says.append(json.loads(file.metadata()["specdec"]))
    assert [said.pop("next_token") for said in says] == [11, None]
    assert says[0] == says[1]
    assert (says[0]["layers"], says[0]["dtype"], says[0]["tensor_parallel"]) == ([0, 2, 3], "float32", 2)


def test_the_connector_leaves_no_half_files_and_one_rank_writes(connector, tmp_path, monkeypatch):
    module, worker = connector

    def full(tensors, path, metadata):
        path.write_bytes(b"half of it")
        raise OSError("the disk is full")

    monkeypatch.setattr(module, "save_file", full)
    worker.request_finished(asked(), [4, 1])
    assert worker.get_finished({"a"}) == ({"a"}, None)
    worker._is_tp_rank_zero = False
    worker.request_finished(asked("b"), [0, 2])
    assert worker.get_finished({"b"}) == (None, None)
    worker._executor.shutdown()
    assert list(tmp_path.glob("*.safetensors*")) + list(tmp_path.glob(".*")) == []
