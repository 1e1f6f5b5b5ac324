"""A drafter that passes everything on to another one."""

from operator import attrgetter
from typing import Any

from torch import Tensor
from typing_extensions import override

from specdec.contracts import Drafter, DraftState

PASSED_ON = (
    "taps", "vocab", "max_steps", "block", "conditioned", "confident", "abstains", "tap_width", "chains_only",
    "acceptance", "trust", "cache", "keeps_first", "switches", "conventions", "reset", "cache_bytes", "admit", "extend",
    "compact", "step", "confidences", "root",
)  # fmt: skip


class WrappedDrafter(Drafter):
    """Drafts as the drafter that it holds. A subclass overrides what it changes or looks at.

    CUDA graphs never hold it, since a subclass may wait for the device. It does not learn.
    """

    def __init__(self, drafter: Drafter):
        """Delegate to `drafter`."""
        super().__init__()
        self.drafter = drafter

    @property
    def user(self) -> Any:
        """The engine that uses the held drafter."""
        return self.drafter.user

    @user.setter
    def user(self, engine: Any) -> None:
        self.drafter.user = engine

    @override
    def expand(self, first: DraftState, tokens: Tensor, hidden: Tensor, level: int, ancestors: Tensor) -> DraftState:
        if self.block is None:
            return self.step(tokens, hidden, level, ancestors)  # a subclass may override it
        return self.drafter.expand(first, tokens, hidden, level, ancestors)


for _name in PASSED_ON:  # methods too: reading one gives the held drafter's own
    setattr(WrappedDrafter, _name, property(attrgetter(f"drafter.{_name}")))
