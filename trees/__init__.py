"""Tree policies: what to draft, given a drafter."""

from specdec.trees.base import Tree
from specdec.trees.block import BlockTree
from specdec.trees.chain import Chain
from specdec.trees.dynamic import DynamicTree
from specdec.trees.sampled import SampledTree
from specdec.trees.static import StaticTree

__all__ = ["BlockTree", "Chain", "DynamicTree", "SampledTree", "StaticTree", "Tree"]
