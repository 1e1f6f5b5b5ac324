"""A round does not wait for the device: no operator in it needs a value on the host."""

from contextlib import nullcontext

import pytest
import torch
from helpers import DRAFTERS, tiny_drafter, tiny_target
from tape import NoHostSync
from test_graphs import POLICIES

from specdec import Engine, Sampling
from specdec.engine.batch import Batch
from specdec.engine.report import Clock
from specdec.engine.sequence import Sequence
from specdec.trees import SampledTree
from specdec.verify import VERIFIERS

# Rows that differ in everything, with penalties and log-probabilities
MIXED = [Sampling(repetition_penalty=1.3), Sampling(0.8, 5, 0.9, 0.02, presence_penalty=0.5, frequency_penalty=-0.2)]
SAMPLINGS = {"greedy": [Sampling()], "sampled": [Sampling(0.8, 5, 0.9, 0.02)], "mixed": MIXED}


def test_the_guard_sees_what_it_should():
    x = torch.ones(3)
    shapes = (lambda: x.nonzero(), lambda: x[x > 0], lambda: x.unique())
    for bad in (lambda: x.sum().item(), lambda: bool(x[0] > 0), lambda: torch.tensor(1.0, device=x.device), *shapes):
        with pytest.raises(AssertionError, match="host synchronisation"), NoHostSync():
            bad()


def run_rounds(engine: Engine, samplings: str) -> None:
    """Play rounds of two rows, one of them active, with all levels and with levels by row; then a round of both."""
    rows = [
        Sequence(prompt, 20, sampling=sampling, logprobs=[] if samplings == "mixed" else None)
        for prompt, sampling in zip(([1, 2, 3], [4]), SAMPLINGS[samplings] * 2, strict=False)
    ]
    batch = Batch(engine.round, 2, 50, Clock(engine.device), overlap=True)
    batch.admit(rows)
    root, state = batch.tensors.root, batch.tensors.state
    active, few = torch.tensor([True, False]), torch.tensor([1, 0])
    batch.cache.max_len = 3
    for guard in (nullcontext(), NoHostSync()):  # shallower trees are made once
        with guard:
            for levels, most in ((None, None), (few, None), (few, 1)) if engine.drafter else ((None, None),) * 2:
                played = engine.round.play(root, state, batch.cache, active, batch.tensors.settings, levels, most)
                root, state, _ = played
            batch.tensors.store(root, state)
            batch.launch(batch.cache.max_len, ())


@pytest.mark.matrix
@pytest.mark.parametrize("drafter", [None, *DRAFTERS])
@pytest.mark.parametrize("policy", ["chain", "dynamic", "static"])
@pytest.mark.parametrize("samplings", SAMPLINGS)
@torch.inference_mode()
def test_round(drafter, policy, samplings):
    target = tiny_target()
    run_rounds(Engine(target, *([DRAFTERS[drafter](target), POLICIES[policy]] if drafter else [])), samplings)


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("samplings", SAMPLINGS)
@torch.inference_mode()
def test_rules_do_not_wait_either(verifier, samplings):
    target, rule = tiny_target(), VERIFIERS[verifier]()
    tree = SampledTree((1, 1) if rule.chains_only else (2, 2))
    run_rounds(Engine(target, tiny_drafter(target), tree, rule), samplings)
