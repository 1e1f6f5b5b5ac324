"""Speculative decoding: a target on a fused engine, pluggable drafters, trees and verifiers.

>>> import specdec
>>> target = specdec.load_target(specdec.DEMO_TARGET)
>>> drafter = specdec.load_drafter(specdec.DEMO_DRAFTER, target)
>>> specdec.generate(target, "What is a tree?", drafter).text[0]  # doctest: +SKIP
"""

import importlib

__version__ = "0.1.0"

# The interface composes all packages, and they import from this one: `specdec.api` is loaded when first asked for.
INTERFACE = {
    "DEMO_DRAFTER",
    "DEMO_TARGET",
    "Generation",
    "ModelSettings",
    "Sampling",
    "TreeSpec",
    "answer",
    "generate",
    "load_drafter",
    "load_target",
    "load_tree",
    "make_tree",
    "make_verifier",
}


def __getattr__(name: str):
    if name in INTERFACE:
        return getattr(importlib.import_module("specdec.api"), name)
    raise AttributeError(f"module 'specdec' has no attribute {name!r}")
