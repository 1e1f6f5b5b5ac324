"""A wrapped drafter is the one that it holds."""

import inspect

from helpers import DRAFTERS, tiny_target

from specdec.contracts import Drafter
from specdec.engine.engine import Engine
from specdec.lab.wrapped import WrappedDrafter
from specdec.trees import DynamicTree

# Of training and graphs.
OWN = {"capturable", "learns", "documents", "recipe", "unroll", "recompute", "heads_in_use", "set_heads",
       "first_tokens", "start_from"}  # fmt: skip
DERIVED = {"chain", "deepest"}  # which call what is passed on


def test_everything_that_decoding_asks_of_a_drafter_is_passed_on():
    """A member that `Drafter` gets must be passed on too, or be named above."""
    members = {name for name in vars(Drafter) if not name.startswith("_")} | set(inspect.get_annotations(Drafter))
    assert members - OWN - DERIVED <= set(vars(WrappedDrafter))


def test_it_drafts_the_same():
    target = tiny_target()
    for kind in ("eagle3", "medusa", "lookup"):
        drafter = DRAFTERS[kind](target)
        rows = [
            Engine(target, each, DynamicTree(3, 3, 9)).generate([[1, 2, 3], [4] * 6], max_new_tokens=20).rows
            for each in (drafter, WrappedDrafter(drafter))
        ]
        assert [row.trace for row in rows[0]] == [row.trace for row in rows[1]]
