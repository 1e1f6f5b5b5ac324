"""fuzz.py: a sample of its cases is right, and a planted fault is found."""

import pytest
import torch
from fuzz import failures

from specdec.model.cache import KVCache


@pytest.mark.matrix
@pytest.mark.parametrize("first", range(0, 150, 5))
def test_rows_decode_together_as_alone(first):
    assert [failures(number) for number in range(first, first + 5)] == [[]] * 5


def test_a_planted_fault_is_found(monkeypatch):
    """Accepted nodes are committed as if they were the first ones, as those of a chain are."""
    commit = KVCache.commit
    wrong = lambda cache, path, *rest: commit(cache, torch.arange(path.shape[1]).expand_as(path), *rest)  # noqa: E731
    monkeypatch.setattr(KVCache, "commit", wrong)
    about, fault, *_ = next(found for number in range(60) if (found := failures(number)))
    assert about.startswith("case ")
    assert fault.startswith("row ")
