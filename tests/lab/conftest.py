"""Models that tests of the lab share."""

import pytest


@pytest.fixture(scope="module")
def target(target_path):
    from specdec.model.loader import load_target

    return load_target(target_path)


@pytest.fixture(scope="module")
def pair():
    """A tiny target and its drafter."""
    from helpers import tiny_drafter, tiny_target

    target = tiny_target()
    return target, tiny_drafter(target)
