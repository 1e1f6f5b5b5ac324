"""The engine uses the kernels where it should, and its text is the same with them."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from helpers import DRAFTERS, tiny_target
from kernel_cases import on_devices

from drafters.draft_model import DraftModel
from specdec import kernels
from specdec.engine.engine import Engine
from specdec.kernels import kernel_for
from specdec.model.target import Target
from trees import Chain, DynamicTree


@pytest.fixture
def triton_everywhere():
    kernels.use("triton")
    yield
    kernels.use("auto")


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
    kernels.use("torch")
    wanted = engine.generate([[3, 5, 7, 2]], max_new_tokens=4).rows[0]
    kernels.use("triton")
    got = engine.generate([[3, 5, 7, 2]], max_new_tokens=4).rows[0]
    assert got.tokens == wanted.tokens
    assert got.trace.accepted == wanted.trace.accepted


@on_devices
@pytest.mark.parametrize("tree", [Chain(4), DynamicTree(2, 3, 7)], ids=["chain", "dynamic"])
def test_a_draft_model_sees_the_levels_before(device, tree, triton_everywhere):
    """Nodes that see only the first level still give lossless text, so accepted lengths tell: a draft model that is the
    target itself has a whole chain accepted, and of a tree as many as with torch."""
    target = tiny_target().to(device)
    engine = Engine(target, DraftModel(target), tree)
    told = []
    for backend in ("torch", "triton"):
        kernels.use(backend)
        told.append(engine.generate([[3, 1, 4], [2]], max_new_tokens=11, eos=frozenset()).rows)
    assert [row.trace for row in told[0]] == [row.trace for row in told[1]]
    if isinstance(tree, Chain):
        assert [row.trace.accepted for row in told[1]] == [[4, 4]] * 2


def test_cpu_tensors_gradients_and_autocast_go_to_torch(triton_everywhere):
    weight = torch.ones(4)
    assert kernel_for("rms_norm", weight) is None  # autograd is on
    with torch.no_grad():
        assert kernel_for("rms_norm", weight.double()) is None
        assert kernel_for("rms_norm", weight) is not None
        with torch.autocast("cpu"):
            assert kernel_for("rms_norm", weight) is None
        kernels.use("auto")
        assert kernel_for("rms_norm", weight) is None


def test_one_kernel_can_be_chosen(triton_everywhere):
    kernels.use("torch", "gated", "commit")
    with torch.no_grad():
        assert kernel_for("gated", torch.ones(4)) is None
        assert kernel_for("rms_norm", torch.ones(4)) is not None


def test_names_are_checked():
    with pytest.raises(ValueError, match="no backend 'cuda'; there are auto, torch, triton"):
        kernels.use("cuda")
    with pytest.raises(ValueError, match="no kernel 'norm'; there are tree_attention"):
        kernels.use("torch", "norm")


def in_fresh_process(code: str) -> str:
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return out.stdout.strip()


def test_nothing_is_imported_before_it_is_needed():
    code = "import sys, specdec.model.target, specdec.sampling.filters; print('triton' in sys.modules)"
    assert in_fresh_process(code) == "False"


def test_without_triton_torch_is_taken_and_said_so():
    """A tensor that claims to be on a GPU stands for a machine with a GPU and no Triton."""
    code = """
import sys, warnings
sys.modules["triton"] = None  # an import fails
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "triton" else find(name, *rest)
import torch
from drafters.draft_model import DraftModel
from specdec import kernels
from types import SimpleNamespace
torch.set_grad_enabled(False)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    like = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, device=torch.device("cuda"))
    print(kernels.kernel_for("commit", like), kernels.kernel_for("gated", like), len(said), said[0].message)
try:
    kernels.use("triton")
except ValueError as error:
    print(error)
"""
    first, second = in_fresh_process(code).split("\n")
    assert first == "None None 1 triton is not installed: decoding takes plain PyTorch, which is slower"
    assert second == "triton is not installed; it comes with torch's CUDA builds, or with `pip install triton`"
