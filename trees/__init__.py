"""Tree policies: what to draft, given a drafter."""

from trees.block import BlockTree
from trees.chain import Chain
from trees.dynamic import DynamicTree
from trees.sampled import SampledTree
from trees.static import StaticTree

__all__ = ["BlockTree", "Chain", "DynamicTree", "SampledTree", "StaticTree"]
