"""A tiny pair to serve."""

import pytest

from specdec.api import load_drafter, load_target


@pytest.fixture(scope="module")
def pair(target_path, drafter_path):
    target = load_target(target_path)
    return target, load_drafter(drafter_path, target)
