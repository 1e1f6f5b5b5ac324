"""Tree policies: what to draft, given a drafter."""

from specdec.trees.base import Tree
from specdec.trees.block import BlockTree
from specdec.trees.dynamic import DynamicTree
from specdec.trees.static import Chain, SampledTree, StaticTree

__all__ = ["BlockTree", "Chain", "DynamicTree", "SampledTree", "StaticTree", "Tree"]
