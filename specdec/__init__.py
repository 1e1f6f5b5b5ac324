"""Speculative decoding: a target on a fused engine, pluggable drafters, trees and verifiers.

>>> import specdec
>>> target = specdec.load_target(specdec.DEMO_TARGET)
>>> drafter = specdec.load_drafter(specdec.DEMO_DRAFTER, target)
>>> specdec.generate(target, "What is a tree?", drafter).text[0]  # doctest: +SKIP
"""

import importlib

__version__ = "0.1.0"


def __getattr__(name: str):
    # The interface composes all packages, and they import from this one: it is loaded when first asked for.
    api = importlib.import_module("specdec.api")
    if name in api.__all__:
        return getattr(api, name)
    raise AttributeError(f"module 'specdec' has no attribute {name!r}")
