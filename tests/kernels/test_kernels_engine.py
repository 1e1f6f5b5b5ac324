"""The engine uses the kernels where it should, and its text is the same with them."""

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import DRAFTERS, random_model, tiny_target
from kernel_cases import on_devices
from test_conf_matrix import NAMES, fresh_drafter

from specdec import Engine, ops
from specdec.drafters.ngram import NGram
from specdec.engine.recorder import Recorder
from specdec.model.target import Target
from specdec.ops import kernel_for, native
from specdec.trees import Chain, DynamicTree


@pytest.fixture
def triton_everywhere():
    ops.use("triton")
    yield
    ops.use("auto")


FAMILIES = {
    "llama": {},
    "gemma": {
        "qk_norm": True, "norm_offset": True, "sandwich_norms": True, "activation": "gelu_tanh", "sliding": (True,),
        "window": 5,
    },
}  # fmt: skip


@on_devices
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_the_same(device, family, triton_everywhere):
    """Prefill, tree, commit, the drafter's levels: each with kernels, in fp32, against torch."""
    torch.manual_seed(0)
    target = Target(replace(tiny_target().config, layers=1, **FAMILIES[family])).eval()
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.normal_(std=0.25)
    target.to(device)
    engine = Engine(target, DRAFTERS["eagle3"](target).to(device), DynamicTree(2, 2, 4))
    ops.use("torch")
    wanted = engine.generate([[3, 5, 7, 2]], max_new_tokens=4).rows[0]
    ops.use("triton")
    got = engine.generate([[3, 5, 7, 2]], max_new_tokens=4).rows[0]
    assert got.tokens == wanted.tokens
    assert got.trace.accepted == wanted.trace.accepted


@pytest.fixture(scope="module")
def windowed_target() -> Target:
    """A layer that slides and one that does not, random such that every drafter of conf/ has something accepted."""
    config = replace(tiny_target(vocab=11).config, layers=2, heads=2, kv_heads=1, sliding=(True, False), window=5)
    torch.manual_seed(143)
    return random_model(config, std=0.5)


@pytest.mark.matrix
@on_devices
@pytest.mark.parametrize("tree", [Chain(3), DynamicTree(2, 3, 6)], ids=["chain", "dynamic"])
@pytest.mark.parametrize("name", NAMES["drafter"])
def test_every_drafter_drafts_the_same(device, name, tree, windowed_target, triton_everywhere):
    """Accepted lengths, and the trees themselves: the text does not show that a drafter sees wrong positions."""
    target = windowed_target.to(device)
    drafter = fresh_drafter(name, target, num_hidden_layers=1, num_attention_heads=2).to(device)
    if isinstance(drafter, NGram):
        drafter.reach = None  # draft after any match; so short a text has no long ones
    engine = Engine(target, drafter, tree)
    results = []
    for backend in ("torch", "triton"):
        ops.use(backend)
        recorder = Recorder()
        engine.generate([[3, 5, 7, 3, 5, 7]], max_new_tokens=7, eos=frozenset(), observer=recorder)
        rounds = recorder.trace.rows[0].rounds
        trees = [r.tree and (r.tree.tokens.tolist(), r.tree.parents.tolist()) for r in rounds]
        results.append([(r.accepted, r.path, nodes) for r, nodes in zip(rounds, trees, strict=True)])
    assert results[0] == results[1]
    assert any(accepted for accepted, *_ in results[0]), "nothing was accepted: the test shows little"


def sums_of(forward) -> list[list]:
    """The shapes of sums of two tensors that a forward takes."""
    with torch.profiler.profile(record_shapes=True) as profile:
        forward()
    return [event.input_shapes[:2] for event in profile.events() if event.name == "aten::add"]


@on_devices
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_residuals_are_added_in_the_norms(device, family, triton_everywhere, monkeypatch):
    """No sum of hidden states is an operator of its own: not after attention, not after an MLP, nor at a tap."""
    config = replace(tiny_target().config, **FAMILIES[family])
    target = Target(replace(config, layers=2, sliding=config.sliding and (True, False))).eval().to(device)
    tokens, feats, states = torch.tensor([[3, 5, 7]], device=device), [], [[3, target.config.hidden]] * 2

    def forward() -> None:
        feats.append(target(tokens, target.new_cache(1, 16), taps=(0, 1, 2))[1])

    assert states not in sums_of(forward)
    ops.use("torch")
    monkeypatch.setattr(native, "has_rows", lambda: False)  # our own on the CPU add there too
    assert sums_of(forward).count(states) == 4
    torch.testing.assert_close(*feats, rtol=0, atol=1e-5)


def test_cpu_tensors_gradients_and_autocast_go_to_torch(triton_everywhere):
    weight = torch.ones(4)
    assert kernel_for("rms_norm", weight) is None  # autograd is on
    with torch.no_grad():
        assert kernel_for("rms_norm", weight.double()) is None
        assert kernel_for("rms_norm", weight) is not None
        with torch.autocast("cpu"):
            assert kernel_for("rms_norm", weight) is None
        ops.use("auto")
        assert kernel_for("rms_norm", weight) is None


def test_one_kernel_can_be_chosen(triton_everywhere):
    ops.use("torch", "gated", "commit")
    with torch.no_grad():
        assert kernel_for("gated", torch.ones(4)) is None
        assert kernel_for("rms_norm", torch.ones(4)) is not None


def test_names_are_checked():
    with pytest.raises(ValueError, match="no backend 'cuda'; there are auto, torch, triton"):
        ops.use("cuda")
    with pytest.raises(ValueError, match="no kernel 'norm'; there are tree_attention"):
        ops.use("torch", "norm")


def test_triton_is_not_imported_before_it_is_needed():
    code = "import sys, specdec.model.target, specdec.sampling.filters; sys.exit('triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@torch.no_grad()
def test_without_triton_torch_is_taken_and_said_so(monkeypatch):
    """A tensor that claims to be on a GPU simulates a machine with a GPU and no Triton."""
    monkeypatch.setattr(ops, "installed", lambda: False)
    ops._say_that_triton_is_missing.cache_clear()
    like = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, device=torch.device("cuda"))
    with pytest.warns(UserWarning, match="triton is not installed: decoding takes plain PyTorch") as said:
        assert [kernel_for(name, like) for name in ("commit", "gated")] == [None, None]
    assert len(said) == 1
    with pytest.raises(ValueError, match="triton is not installed; it comes with torch's CUDA builds, or with `pip"):
        ops.use("triton")
