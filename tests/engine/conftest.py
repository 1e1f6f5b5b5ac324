"""Fixtures of the engine's tests."""

import pytest

from specdec.ops import linear as cpu_linear


@pytest.fixture
def unpacked(monkeypatch):
    """Leave weights unpacked: an interpreted graph takes packed ones with the operators of `native.cpp` only."""
    monkeypatch.setattr(cpu_linear, "pack", lambda *args: None)
