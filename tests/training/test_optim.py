"""Muon in fp32, where a processor has no products in bf16, is torch's Muon."""

import copy

import pytest
import torch
from torch import nn

from specdec.training.loop import optim
from specdec.training.loop.optim import Muon

SHAPES = [(24, 48), (48, 24), (32, 32)]


@pytest.fixture
def without_bf16(monkeypatch):
    monkeypatch.setattr(optim, "fast_bf16", lambda device: False)


def stepped(kind: type, steps: int, state: dict | None = None) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
    """What so many steps add to matrices, and the optimizer; the first one is without a gradient."""
    draw = torch.Generator().manual_seed(0)
    matrices = [nn.Parameter(torch.randn(shape, generator=draw)) for shape in [(3, 3), *SHAPES]]
    optimizer, before = kind(matrices, lr=0.1, momentum=0.95, weight_decay=0.05), [m.detach().clone() for m in matrices]
    if state is not None:
        optimizer.load_state_dict(copy.deepcopy(state))  # which is changed in place
    for _ in range(steps):
        for matrix in matrices[1:]:
            matrix.grad = torch.randn(matrix.shape, generator=draw)
        optimizer.step()
    return [matrix.detach() - old for matrix, old in zip(matrices, before, strict=True)], optimizer


@pytest.mark.usefixtures("without_bf16")
@pytest.mark.parametrize("state", [None, torch.optim.Muon, Muon])
def test_steps_are_torchs_up_to_its_rounding(state):
    """Also from a state that the other one wrote."""
    state = None if state is None else stepped(state, 3)[1].state_dict()
    ours, theirs = (stepped(kind, 3, state)[0] for kind in (Muon, torch.optim.Muon))
    assert not ours[0].any()
    for one, other in zip(ours[1:], theirs[1:], strict=True):
        assert (one - other).norm() < 2**-5 * other.norm()  # torch rounds 15 products one after the other to 2^-9
        assert not torch.equal(one, other)


def test_with_products_in_bf16_it_is_torchs(monkeypatch):
    monkeypatch.setattr(optim, "fast_bf16", lambda device: True)
    ours, theirs = (stepped(kind, 2)[0] for kind in (Muon, torch.optim.Muon))
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
