"""What the contenders CTranslate2 and llama.cpp share. Both decode the target's own weights.

A target is handed over as token ids and weights: its weights are written from the target as it lies in memory, and its
tokens are called by their numbers. So a target needs no tokenizer that another engine knows, random weights will do,
and nothing is downloaded. The files lie in a temporary folder while the engine loads them, and are removed then.
"""

from collections.abc import Callable, Set
from dataclasses import MISSING, fields
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from specdec.lab.bench.contenders import Contender, NotAvailable, TimedRun
from specdec.lab.bench.peer_process import Answer, PeerProcess, Session
from specdec.lab.cost.memory import read_bytes
from specdec.model.archs import ModelConfig
from specdec.model.target import Target
from specdec.structs import Sampling

INSTALL = "pip install '.[peers]'"


class Peer(Contender):
    """Another engine on the target's weights, in `dtype`, with as many threads as torch has when it is made."""

    engine: str  # its name
    peer = True
    settle_seconds = 0.3  # Intel's OpenMP spins for 0.2 s

    def __init__(self, target: Target, slots: int, dtype: torch.dtype):
        """slots: tokens of the longest text that will be decoded, its prompt included."""
        self.slots, self.dtype, self.threads = slots, dtype, torch.get_num_threads()
        check_target(target, self.engine)
        self.weights = weight_values(target) * dtype.itemsize
        config = target.config
        self.values = 2 * config.layers * config.kv_heads * config.head_dim  # keys and values of a token

    def load(self, fill: Callable[[Path], object], session: type[Session], **settings) -> None:
        """Start a session with a temporary folder that `fill` has filled. The folder is removed either way."""
        with TemporaryDirectory(prefix="specdec-bench-", ignore_cleanup_errors=True) as folder:
            fill(Path(folder))
            self.process = PeerProcess(session, Path(folder), settings)

    def ask(self, request: dict, cache_bytes: int) -> TimedRun:
        """What the session makes of a request."""
        return timed_run(self.process(request), cache_bytes)

    def moved(self, target: Target, context: float) -> float:
        """As of `Contender`. Weights and cache count in the widths that this engine keeps them in."""
        weights = read_bytes(target, 0, packed=False)
        cache = read_bytes(target, context, packed=False) - weights
        return (weights * self.dtype.itemsize + cache * self.cache_dtype.itemsize) / target.dtype.itemsize

    @property
    def cache_dtype(self) -> torch.dtype:
        """Of keys and values."""
        return self.dtype

    def cache_bytes(self, tokens: int) -> int:
        """Of the keys and values of so many tokens."""
        return tokens * self.values * self.cache_dtype.itemsize


def weight_values(target: Target) -> int:
    """The number of the target's weights; a head that is the embedding counts once."""
    return sum(p.numel() for p in target.parameters())


def check_target(target, engine: str) -> None:
    """Raise NotAvailable for a target that no peer takes: one of transformers' modules, or one on another device."""
    if not isinstance(target, Target):
        raise NotAvailable(f"{engine} is given native targets only, and transformers' own modules decode this one")
    if target.device.type != "cpu":
        raise NotAvailable(f"{engine} is measured on the CPU only, the target is on {target.device}")


def special_parts(config: ModelConfig, slots: int) -> set[str]:
    """What the model has beyond Llama's plain block, as names of fields of `ModelConfig`.

    Windows that hold all of the `slots` tokens are none. A rope that is scaled is `rope.linear` or `rope.llama3`."""
    optional = [f for f in fields(config) if f.default is not MISSING]
    parts = {f.name for f in optional if getattr(config, f.name) != f.default}
    if config.window is None or config.window >= slots:
        parts -= {"sliding", "window"}
    if config.attention_scale == config.head_dim**-0.5:
        parts.discard("attention_scale")
    if config.rope.scaling != "default":
        parts.add(f"rope.{config.rope.scaling}")
    return parts


def check_parts(config: ModelConfig, slots: int, known: Set[str], who: str) -> None:
    """Raise NotAvailable, with the names, for parts of the model that are not `known`."""
    if absent := special_parts(config, slots) - known:
        raise NotAvailable(f"{who} is not given models with {' and '.join(sorted(absent))}")


def timed_run(answer: Answer, cache_bytes: int) -> TimedRun:
    """The run that an engine answered with."""
    first = answer.marks[0] if answer.marks else answer.end
    steps = [after - before for before, after in pairwise(answer.marks)]
    return TimedRun(answer.tokens, answer.end - answer.start, first - answer.start, steps, cache_bytes)


def shared_sampling(sampling: Sampling, names: dict[str, str], engine: str) -> dict:
    """The settings that are not off, under the engine's `names` of them.

    Raises NotAvailable for those that it does not have."""
    if absent := sampling.active - set(names):
        raise NotAvailable(f"{engine} has no {' and no '.join(sorted(absent))} as it is meant here")
    return {names[name]: getattr(sampling, name) for name in sampling.active}
