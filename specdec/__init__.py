"""Speculative decoding: a target on a fused engine, pluggable drafters, trees and verifiers.

>>> import specdec
>>> target = specdec.load_target("demo/target")
>>> drafter = specdec.load_drafter("demo/mtp", target)
>>> specdec.generate(target, "What is a tree?", drafter).text[0]  # doctest: +SKIP
>>> specdec.compare(target, ["demo/mtp", "ngram"], ["What is a tree?", "Hello!"])  # doctest: +SKIP
"""

import importlib
from typing import TYPE_CHECKING

from specdec.threads import Threads, limit_spinning

if TYPE_CHECKING:  # editors and type checkers do not see what `__getattr__` returns
    from specdec.api import *  # noqa: F403
    from specdec.engine.engine import Engine as Engine
    from specdec.engine.recorder import Recorder as Recorder
    from specdec.lab.sweep.comparison import Comparison as Comparison
    from specdec.lab.sweep.comparison import compare as compare
    from specdec.training.fit import Training as Training
    from specdec.training.fit import train as train

limit_spinning()
Threads(on=True)  # the first look at the load of other programs
__version__ = "0.1.0"

# The interface composes all packages, and they import from this one: a module is loaded when first asked for a name.
_API = (
    "DEMO_DRAFTER", "DEMO_TARGET", "Generation", "ModelSettings", "Sampling", "answer", "generate", "load_drafter",
    "load_target", "load_tree", "make_tree", "make_verifier", "parse_tree",
)  # fmt: skip
INTERFACE = dict.fromkeys(_API, "specdec.api") | {
    "Engine": "specdec.engine.engine",
    "Recorder": "specdec.engine.recorder",
    "Comparison": "specdec.lab.sweep.comparison",
    "compare": "specdec.lab.sweep.comparison",
    "Training": "specdec.training.fit",
    "train": "specdec.training.fit",
}
__all__ = sorted([*INTERFACE, "__version__"])


def __getattr__(name: str):
    if name in INTERFACE:
        return getattr(importlib.import_module(INTERFACE[name]), name)
    raise AttributeError(f"module 'specdec' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__} - {"importlib", "INTERFACE", "TYPE_CHECKING", "Threads", "limit_spinning"})
