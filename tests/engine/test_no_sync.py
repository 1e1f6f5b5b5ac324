"""A round does not wait for the device: no operator in it needs a value on the host."""

from pathlib import Path

import pytest
import torch
from helpers import DRAFTERS, tiny_drafter, tiny_target
from tape import NoHostSync

from specdec.engine.batch import Batch
from specdec.engine.clock import Clock
from specdec.engine.engine import Engine
from specdec.engine.sequence import Sequence
from specdec.structs import Sampling
from specdec.trees import Chain, DynamicTree, SampledTree, StaticTree
from specdec.verify import VERIFIERS

ROOT = Path(__file__).parents[2]


def test_the_guard_sees_what_it_should():
    x = torch.ones(3)
    shapes = (lambda: x.nonzero(), lambda: x[x > 0], lambda: x.unique())
    for bad in (lambda: x.sum().item(), lambda: bool(x[0] > 0), lambda: torch.tensor(1.0, device=x.device), *shapes):
        with pytest.raises(AssertionError, match="host synchronisation"), NoHostSync():
            bad()


def test_no_tolist_or_cpu_where_the_guard_is_blind():
    """On CPU tensors these two run without an operator."""
    files = [*(ROOT / "trees").glob("*.py"), *(ROOT / "drafters").glob("*.py")]
    files.remove(ROOT / "trees" / "optimal.py")  # it measures acceptance along texts: no part of a round
    files += [*(ROOT / "specdec" / "verify").glob("*.py")]
    files += [
        ROOT / "specdec" / f"{name}.py"
        for name in ("contracts", "model/cache", "model/attention", "model/target", "model/layers")
    ]
    files += [*(ROOT / "specdec" / "sampling").glob("*.py")]
    for path in files:
        source = path.read_text(encoding="utf-8")
        assert ".tolist(" not in source, path
        assert ".cpu(" not in source, path


POLICIES = {
    "chain": Chain(3),
    "dynamic": DynamicTree(3, 3, 9),
    "static": StaticTree([[0], [1], [0, 0], [0, 2], [1, 0], [0, 2, 0]]),
}


@pytest.mark.matrix
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, 5, 0.9, 0.02)], ids=["greedy", "sampled"])
@torch.inference_mode()
def test_round(drafter, policy, sampling):
    target = tiny_target()
    run_rounds(Engine(target, DRAFTERS[drafter](target), POLICIES[policy]), sampling)


def run_rounds(engine: Engine, *samplings: Sampling, logprobs: bool = False) -> None:
    """Two rounds of two rows, of which the second stands still."""
    rows = [
        Sequence(prompt, 20, sampling=sampling, logprobs=[] if logprobs else None)
        for prompt, sampling in zip(([1, 2, 3], [4]), samplings * 2, strict=False)
    ]
    batch = Batch(engine.round, 2, 24, Clock(engine.device))
    batch.admit(rows)
    root, state, active = batch.root, batch.state, torch.tensor([True, False])
    batch.cache.max_len = 3
    with NoHostSync():
        for _ in range(2):
            root, state, _ = engine.round.play(root, state, batch.cache, active, batch.settings)


# Rows that differ in everything, under penalties, with log-probabilities
MIXED = [Sampling(repetition_penalty=1.3), Sampling(0.8, 5, 0.9, 0.02, presence_penalty=0.5, frequency_penalty=-0.2)]


@pytest.mark.parametrize("policy", POLICIES)
@torch.inference_mode()
def test_rows_that_differ_and_penalties(policy):
    target = tiny_target()
    run_rounds(Engine(target, tiny_drafter(target), POLICIES[policy]), *MIXED, logprobs=True)


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, 5, 0.9, 0.02)], ids=["greedy", "sampled"])
@torch.inference_mode()
def test_rules_do_not_wait_either(verifier, sampling):
    target, rule = tiny_target(), VERIFIERS[verifier]()
    run_rounds(
        Engine(target, tiny_drafter(target), SampledTree((1, 1) if rule.chains_only else (2, 2)), rule), sampling
    )


@pytest.mark.parametrize("penalised", [False, True])
@torch.inference_mode()
def test_plain_round(penalised):
    run_rounds(Engine(tiny_target()), *(MIXED if penalised else [Sampling(1.0)]), logprobs=penalised)
