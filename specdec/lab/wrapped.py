"""A drafter that passes everything on to another one."""

from collections.abc import Mapping

from torch import Tensor

from specdec.acceptance import Acceptance
from specdec.contracts import Drafter, DraftState, Vocabulary
from specdec.model.cache import KVCache
from specdec.structs import Survivors


class WrappedDrafter(Drafter):
    """Drafts as the drafter that it holds. A subclass overrides what it changes or looks at.

    CUDA graphs never hold it, since a subclass may wait for the device. It does not learn.
    """

    def __init__(self, drafter: Drafter):
        super().__init__()
        self.drafter = drafter

    @property
    def taps(self) -> tuple[int, ...]:
        return self.drafter.taps

    @property
    def vocab(self) -> Vocabulary:
        return self.drafter.vocab

    @property
    def max_steps(self) -> int | None:
        return self.drafter.max_steps

    @property
    def block(self) -> int | None:
        return self.drafter.block

    @property
    def conditioned(self) -> bool:
        return self.drafter.conditioned

    @property
    def confident(self) -> bool:
        return self.drafter.confident

    @property
    def abstains(self) -> bool:
        return self.drafter.abstains

    @property
    def tap_width(self) -> int | None:
        return self.drafter.tap_width

    @property
    def chains_only(self) -> bool:
        return self.drafter.chains_only

    @property
    def acceptance(self) -> Acceptance | None:
        return self.drafter.acceptance

    @property
    def trust(self) -> float:
        return self.drafter.trust

    @property
    def cache(self) -> KVCache | None:
        return self.drafter.cache

    @property
    def keeps_first(self) -> bool:
        return self.drafter.keeps_first

    @property
    def switches(self) -> object:
        return self.drafter.switches

    @property
    def conventions(self) -> Mapping[str, str]:
        return self.drafter.conventions

    def reset(self, rows: int, slots: int) -> None:
        self.drafter.reset(rows, slots)

    def cache_bytes(self, rows: int, slots: int) -> int:
        return self.drafter.cache_bytes(rows, slots)

    def admit(self, row: int, first: Tensor, feats: Tensor | None, tokens: Tensor, n: Tensor) -> DraftState:
        return self.drafter.admit(row, first, feats, tokens, n)

    def extend(self, feats: Tensor | None, tokens: Tensor, n: Tensor, max_len: int) -> DraftState:
        return self.drafter.extend(feats, tokens, n, max_len)

    def compact(self, kept: Survivors) -> None:
        self.drafter.compact(kept)

    def step(self, tokens: Tensor, hidden: Tensor, level: int, ancestors: Tensor) -> DraftState:
        return self.drafter.step(tokens, hidden, level, ancestors)

    def confidences(self, first: DraftState, tokens: Tensor) -> Tensor:
        return self.drafter.confidences(first, tokens)

    def root(self, first: DraftState) -> DraftState:
        return self.drafter.root(first)

    def expand(self, first: DraftState, tokens: Tensor, hidden: Tensor, level: int, ancestors: Tensor) -> DraftState:
        if self.block is None:
            return self.step(tokens, hidden, level, ancestors)
        return self.drafter.expand(first, tokens, hidden, level, ancestors)
