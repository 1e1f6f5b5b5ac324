"""A simulated tau: the rounds emit what was asked for, and nobody can mistake it for a measurement."""

import math

import pytest
import torch
from helpers import tiny_drafter, tiny_target

from specdec.engine.engine import Engine
from specdec.lab.cost.simulated_tau import MARK, SimulatedTau
from specdec.structs import Sampling
from specdec.trees import Chain, DynamicTree, SampledTree
from specdec.verify import VERIFIERS, BlockVerification


@pytest.mark.parametrize("wanted", [1, 1.5, 2.75, 4])
@pytest.mark.parametrize("tree", [Chain(3), DynamicTree(3, 3, 9), DynamicTree(3, 3, 3)])
def test_rounds_emit_what_was_asked_for(wanted, tree):
    target = tiny_target()
    engine = Engine(target, tiny_drafter(target), tree, SimulatedTau(wanted))
    rows = engine.generate([[1, 2, 3], [4] * 7], max_new_tokens=81, eos=frozenset()).rows
    for row in rows:
        emitted = row.trace.emitted
        assert sum(emitted) == 80
        assert abs(sum(emitted[:-1]) - wanted * (len(emitted) - 1)) < 1
        assert set(emitted[:-1]) <= {int(wanted), -int(-wanted // 1)}
        assert len(emitted) == math.ceil(80 / wanted)


def test_the_true_rule_is_run_and_its_needs_hold():
    target, calls = tiny_target(), []

    class Counted(BlockVerification):
        def __call__(self, *args):
            calls.append(1)
            return super().__call__(*args)

    verifier = SimulatedTau(2, Counted())
    with pytest.raises(ValueError, match="drawn from"):
        Engine(target, tiny_drafter(target), Chain(2), verifier)
    engine = Engine(target, tiny_drafter(target), SampledTree([1, 1]), verifier)
    out = engine.generate([[1, 2]], max_new_tokens=9, sampling=Sampling(1.0), eos=frozenset())
    assert len(calls) == out.rows[0].trace.rounds == 4


def test_it_is_marked_and_no_verifier_of_the_project():
    verifier = SimulatedTau(3.0)
    assert str(verifier).startswith(MARK)
    assert not verifier.lossless
    assert SimulatedTau not in VERIFIERS.values()


@pytest.mark.parametrize("wanted", [0.5, float("inf"), float("nan")])
def test_a_tau_that_cannot_be_is_refused(wanted):
    with pytest.raises(ValueError, match="at least 1"):
        SimulatedTau(wanted)


def test_a_tau_beyond_the_tree_is_refused():
    target = tiny_target()
    engine = Engine(target, tiny_drafter(target), Chain(2), SimulatedTau(3.5))
    with pytest.raises(ValueError, match=r"at least 2\.5 levels, this one has 2"):
        engine.generate([[1, 2]], eos=frozenset())


def test_nothing_is_read_from_the_device(monkeypatch):
    """The counter is a tensor: a round that was captured goes on counting."""
    target = tiny_target()
    verifier = SimulatedTau(2.5)
    Engine(target, tiny_drafter(target), Chain(3), verifier).generate([[1]], max_new_tokens=11, eos=frozenset())
    assert isinstance(verifier.rounds, torch.Tensor)
    assert verifier.rounds.item() == 4
