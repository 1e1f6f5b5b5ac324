"""The grammars of a batch's rows."""

from collections import abc

from torch import Tensor

from specdec.engine.sequence import Sequence
from specdec.sampling.grammar import masked
from specdec.structs import DraftTree


class Masks:
    """Masks the logits of rows whose text obeys a grammar. A row that has ended has no matcher any more."""

    def __init__(self, sequences: abc.Sequence[Sequence]):
        """Those of the rows."""
        self.sequences = list(sequences)

    def __bool__(self) -> bool:
        """Whether any text goes on that obeys a grammar."""
        return any(s.matcher is not None for s in self.sequences)

    def __call__(self, logits: Tensor, tree: DraftTree | None = None) -> Tensor:
        """As `specdec.sampling.grammar.masked`. What the rows have emitted must have been added to the sequences.
        This waits for the tree."""
        seen = () if tree is None or not self else (tree.tokens.tolist(), tree.parents.tolist())
        return masked(logits, [s.matcher for s in self.sequences], *seen)


def masks_of(sequences: abc.Sequence[Sequence]) -> Masks | None:
    """None if no row has a grammar."""
    return Masks(sequences) if any(s.matcher is not None for s in sequences) else None
