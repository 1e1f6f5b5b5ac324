"""What a round launches on a GPU, counted without one, and the bounds that it is held to."""

import json
from collections import Counter
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from helpers import DRAFTERS, tiny_target

from specdec import kernels
from specdec.engine.round import Round
from specdec.lab.cost import gpu_round
from specdec.lab.cost.absent_gpu import absent_gpu
from specdec.lab.cost.gpu_round import counted, counted_launches
from specdec.lab.cost.launches import ROOT, SELECTION, TARGET, VERIFICATION, LaunchCounter, count_round
from specdec.lab.cost.roofline import CHAIN, PLAIN, TREE
from specdec.trees import Chain, DynamicTree, SampledTree, StaticTree
from specdec.trees.spec import TreeSpec
from specdec.verify import make_verifier

triton = pytest.importorskip("triton", reason="Triton is not installed")

LARGE = TreeSpec(10, 8, 60)


def test_a_round_keeps_its_bounds():
    """The most launches of a draft level, the selection, and all between the target's forward and the commit."""
    found = counted(LARGE)
    assert len(found.levels) == LARGE.steps - 1
    assert max(found.levels) <= 25
    assert found.of(SELECTION) <= 12
    assert found.of(VERIFICATION) <= 15
    assert max(counted(TreeSpec(1, 5)).levels) <= 25


def test_the_bounds_are_those_of_the_kernels():
    """With torch's operators alone the counter sees that they are not kept."""
    kernels.use("torch")
    try:
        found = counted(LARGE)
    finally:
        kernels.use("auto")
    assert max(found.levels) > 25
    assert found.of(SELECTION) > 12


COSTS = {
    "add": (lambda x: x + 1, 1),
    "view": (lambda x: x[:, None, 1:].expand(4, 3, 5).transpose(0, 1), 0),
    "reshape that copies": (lambda x: x.t().reshape(-1), 1),
    "memory": (lambda x: torch.empty_like(x), 0),
    "nothing": (lambda x: x[:, :0] + 1, 0),
    "arange": (lambda x: torch.arange(3, device=x.device), 1),
    "on the host": (lambda x: torch.arange(3), 0),
    "where with a number": (lambda x: torch.where(x > 0, x, 0.0), 3),
    "pad": (lambda x: F.pad(x, (1, 0)), 2),
    "sort": (lambda x: x.sort(dim=1), 4),
    "topk": (lambda x: x.topk(2), 2),
    "product of a composite": (lambda x: F.linear(x, x), 1),
    "in place": (lambda x: x.mul_(2).add_(1), 2),
    "an item": (lambda x: x.__setitem__((0, 1), 2.0), 1),
    "random": (lambda x: torch.empty_like(x).exponential_(), 1),
}


@pytest.mark.parametrize("name", COSTS)
def test_operators_by_hand(name):
    run, wanted = COSTS[name]
    counter = LaunchCounter()
    with torch.inference_mode(), absent_gpu(counter.note) as device:
        x = torch.zeros(4, 6, device=device)
        counter.part = "here"
        with counter:
            run(x)
    assert sum(counter.found.get("here", Counter()).values()) == wanted


def test_nothing_is_left_behind():
    run = triton.runtime.jit.JITFunction.run
    with torch.inference_mode(), absent_gpu() as device:
        assert torch.ones(2, device=device).is_cuda
        assert torch.ones(2, device=device).tolist() == [0, 0], "it holds nothing"
    assert torch.ones(2).tolist() == [1, 1]
    assert triton.runtime.jit.JITFunction.run is run


POLICIES = {
    "dynamic": lambda: DynamicTree(2, 3, 6),
    "chain": lambda: Chain(3),
    "static": lambda: StaticTree([[0], [1], [0, 0], [0, 2], [1, 0], [0, 2, 0]]),
    "sampled": lambda: SampledTree((2, 2, 1)),
}


def pieces(drafter: str, policy: str) -> Round:
    target = tiny_target()
    return Round(target, DRAFTERS[drafter](target).eval(), POLICIES[policy](), make_verifier("match"))


@pytest.mark.parametrize(
    ("drafter", "policy"),
    [
        *(("eagle3", policy) for policy in POLICIES),
        *((other, "dynamic") for other in ("mtp-three-heads", "draft-model")),
    ],
)
def test_what_is_counted_is_what_runs(drafter, policy):
    """The same kernels in the same parts as when they run, in Triton's interpreter."""
    counter = LaunchCounter()
    round_ = pieces(drafter, policy)
    with torch.inference_mode(), absent_gpu(counter.note) as device:
        round_.target.to(device)
        round_.drafter.to(device)
        counted = count_round(round_, counter, context=64)
    function = triton.runtime.interpreter.InterpretedFunction
    run = function.run

    launched, names = LaunchCounter(), set()

    def note(self, *args, **options):
        name = self.fn.__name__.strip("_")
        names.add(name)
        launched.note(name)
        return run(self, *args, **options)

    kernels.use("triton")
    try:
        with torch.inference_mode(), patch.object(function, "run", note):
            ran = count_round(pieces(drafter, policy), launched, context=64)
    finally:
        kernels.use("auto")
    assert names, "no kernel ran"
    for part in ran.found:
        assert {n: counted.found[part][n] for n in names} == {n: ran.found[part][n] for n in names}, part


def test_what_cannot_be_captured_is_refused():
    with pytest.raises(ValueError, match="NGram cannot be captured"):
        count_round(pieces("lookup", "chain"), LaunchCounter())


def test_the_roofline_gets_the_counts():
    found = counted_launches()
    assert found[PLAIN].level == found[PLAIN].absorb == found[CHAIN].selection == 0
    assert found[TREE].level == max(counted(gpu_round.TREES[0]).levels)
    four = counted(None, layers=4).of(TARGET)
    assert found[PLAIN].target + 4 * found[PLAIN].layer == four
    assert found[TREE].layer == found[PLAIN].layer == found[CHAIN].layer


def test_a_sampled_round_keeps_its_bounds():
    """It has noise to make, once, and children to couple to it."""
    greedy, sampled = (counted(LARGE, temperature=t) for t in (0.0, 0.7))
    assert greedy.of(ROOT) < sampled.of(ROOT) <= 50
    assert max(greedy.levels) < max(sampled.levels) <= 28
    assert greedy.of(VERIFICATION) < sampled.of(VERIFICATION) <= 20


def test_the_command(capsys):
    gpu_round.main(["--hardware", "h200", "--launch", "2", "--json"])
    text = capsys.readouterr().out
    assert "computed, not measured" in text
    told = json.loads(text.splitlines()[-1])["rounds"]
    assert told["10/8/60"]["draft levels"]["launches"] == 7 * max(counted(LARGE).levels)
    for parts in told.values():
        for name, cost in parts.items():
            assert cost["seconds"] >= cost["launches"] * 2e-6, name
            assert cost["seconds"] >= cost["bytes"] / 4.3e12, name


@pytest.mark.parametrize("flags", [["--launch", "-1"], ["--context", "0"]])
def test_mistakes(capsys, flags):
    with pytest.raises(SystemExit) as stop:
        gpu_round.main(flags)
    assert stop.value.code == 2
    assert "must" in capsys.readouterr().err
