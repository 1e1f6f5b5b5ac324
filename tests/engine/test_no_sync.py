"""A round does not wait for the device: no operator in it needs a value on the host."""

from pathlib import Path

import pytest
import torch
from helpers import DRAFTERS, tiny_drafter, tiny_target
from tape import NoHostSync

from specdec.engine.clock import Clock
from specdec.engine.engine import Engine
from specdec.sampling.penalties import Penalties
from specdec.types import Sampling, SamplingBatch
from specdec.verify import VERIFIERS
from trees import Chain, DynamicTree, SampledTree, StaticTree

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


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, 5, 0.9, 0.02)], ids=["greedy", "sampled"])
@torch.inference_mode()
def test_round(drafter, policy, sampling):
    target = tiny_target()
    run_rounds(Engine(target, DRAFTERS[drafter](target), POLICIES[policy]), sampling)


def run_rounds(engine: Engine, sampling: Sampling | SamplingBatch, penalties: Penalties | None = None) -> None:
    rows = engine._rows([[1, 2, 3], [4]], 20)
    generator = torch.Generator().manual_seed(0)
    root, state, cache = engine._prefill(rows, sampling, generator, penalties)
    active = torch.tensor([True, False])
    how = sampling, generator, Clock(engine.device), penalties, penalties is not None
    with NoHostSync():
        for _ in range(2):
            root, state, *_ = engine.round(root, state, cache, active, *how)


# Rows that differ in everything, under penalties, with log-probabilities
MIXED = [Sampling(repetition_penalty=1.3), Sampling(0.8, 5, 0.9, 0.02, presence_penalty=0.5, frequency_penalty=-0.2)]


@pytest.mark.parametrize("policy", POLICIES)
@torch.inference_mode()
def test_rows_that_differ_and_penalties(policy):
    target = tiny_target()
    penalties = Penalties(MIXED, [[1, 2, 3], [4]], target.config.vocab, torch.device("cpu"))
    run_rounds(
        Engine(target, tiny_drafter(target), POLICIES[policy]), SamplingBatch(MIXED, torch.device("cpu")), penalties
    )


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
    engine, prompts = Engine(tiny_target()), [[1, 2, 3], [4]]
    sampling = SamplingBatch(MIXED, engine.device) if penalised else Sampling(1.0)
    penalties = Penalties(MIXED, prompts, 17, engine.device) if penalised else None
    generator = torch.Generator().manual_seed(0)
    root, _, cache = engine._prefill(engine._rows(prompts, 20), sampling, generator, penalties)
    how = sampling, generator, Clock(engine.device), penalties, penalised
    active = torch.tensor([True, True])
    with NoHostSync():
        engine.plain_round(root, cache, active, *how)
