"""Tree policies: what to draft, given a drafter."""

from trees.chain import Chain
from trees.dynamic import DynamicTree

__all__ = ["Chain", "DynamicTree"]
