"""Other engines as contenders of the benchmark, by name."""

from collections.abc import Callable
from functools import partial

from specdec.lab.bench.contenders import Contender
from specdec.lab.bench.peers_ctranslate2 import CTranslate2
from specdec.lab.bench.peers_llama_cpp import LlamaCpp
from specdec.model.checkpoint import DTYPES

ENGINES = {"ctranslate2": CTranslate2, "llama.cpp": LlamaCpp}


def peers_by_name(target, slots: int) -> dict[str, Callable[[], Contender]]:
    """How to make each: ENGINE with weights of the target's dtype, ENGINE-fp32, -fp16 and -bf16 with those of another.

    slots: tokens of the longest text that will be decoded, its prompt included."""
    makers: dict[str, Callable[[], Contender]] = {}
    for name, engine in ENGINES.items():
        makers[name] = partial(engine, target, slots, target.dtype)
        makers |= {f"{name}-{short}": partial(engine, target, slots, dtype) for short, dtype in DTYPES.items()}
    return makers
