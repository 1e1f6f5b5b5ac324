"""Other engines as contenders of the benchmark: CTranslate2 and llama.cpp. Both decode the target's own weights.

The files of `peer_weights` are in a temporary folder while the engine loads them.
"""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import MISSING, fields
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from typing_extensions import override

from specdec.lab.bench import peer_sessions
from specdec.lab.bench.contenders import SHARED, Contender, NotAvailable, TimedRun, read_bytes, translated
from specdec.lab.bench.peer_weights import copy_gguf, write_ctranslate2, write_gguf
from specdec.model.archs import ModelConfig
from specdec.model.checkpoint import DTYPES
from specdec.model.target import Target
from specdec.structs import Sampling

# The parts of a model, beyond Llama's plain block, that an engine is given. They are named as fields of `ModelConfig`;
# a scaled rope is `rope.linear` or `rope.llama3`.
BIASES = {"qkv_bias", "o_bias", "mlp_bias"}
GEMMA = {"qk_norm", "norm_offset", "sandwich_norms", "activation", "embed_scale", "local_rope"}
# Without windows: CTranslate2 limits the cache only, and within a longer prompt every token sees all.
CTRANSLATE2 = BIASES | GEMMA | {"attention_scale", "rope.linear", "rope.llama3"}
LLAMA_CPP = {  # by architecture
    "llama": BIASES | {"rope.linear", "rope.llama3"},
    "qwen2": {"qkv_bias", "rope.linear"},
    "qwen3": {"qk_norm", "rope.linear"},
    "gemma3": GEMMA | {"sliding", "window"},
}
CELLS = 256  # llama.cpp pads a context to a multiple of this many tokens


class Peer(Contender):
    """Another engine on the target's weights, in `dtype`, with as many threads as torch has when it is made."""

    engine: str  # its name
    modules: tuple[str, ...]  # what is imported: the engine first
    peer = True
    settle_seconds = 0.3  # Intel's OpenMP spins for 0.2 s

    def __init__(self, target: Target, slots: int, dtype: torch.dtype):
        """slots: tokens of the longest text that will be decoded, its prompt included."""
        self.slots, self.dtype, self.threads = slots, dtype, torch.get_num_threads()
        self.cache_dtype = dtype  # of keys and values
        if not isinstance(target, Target):
            raise NotAvailable(
                f"{self.engine} takes native targets only, and transformers' own modules decode this one"
            )
        if target.device.type != "cpu":
            raise NotAvailable(f"{self.engine} is measured on the CPU only, the target is on {target.device}")
        self.weights = sum(p.numel() for p in target.parameters()) * dtype.itemsize
        self.values = 2 * target.config.layers * target.config.kv_heads * target.config.head_dim  # of a token's cache
        try:
            self.module, *_ = map(import_module, self.modules)
        except ImportError as error:
            raise NotAvailable(f"{self.engine} cannot be imported ({error}): pip install 'specdec[peers]'") from None

    @classmethod
    def check(cls, config: ModelConfig, slots: int, known: set[str]) -> None:
        """Raise NotAvailable for parts that are not `known`. A window that holds all of the `slots` tokens is none."""
        parts = {f.name for f in fields(config) if f.default is not MISSING and getattr(config, f.name) != f.default}
        if config.window is None or config.window >= slots:
            parts -= {"sliding", "window"}
        if config.attention_scale == config.head_dim**-0.5:
            parts.discard("attention_scale")
        if config.rope.scaling != "default":
            parts.add(f"rope.{config.rope.scaling}")
        if absent := parts - known:
            raise NotAvailable(f"{cls.engine} is not given models with {' and '.join(sorted(absent))}")

    def load(self, fill: Callable[[Path], object], session: Callable, **settings) -> None:
        """Start a session in a new process, from a temporary folder that `fill` has filled."""
        how: dict[str, Any] = {"mp_context": get_context("spawn"), "initializer": peer_sessions.end_with_parent}
        self.process = ProcessPoolExecutor(1, **how)
        with TemporaryDirectory(prefix="specdec-bench-", ignore_cleanup_errors=True) as folder:
            fill(Path(folder))
            self.process.submit(peer_sessions.load, session, folder, settings).result()

    def ask(self, request: dict, slots: int) -> TimedRun:
        """Decode, with a cache of `slots` tokens."""
        done = self.process.submit(peer_sessions.decode, request).result()
        return TimedRun(*done, slots * self.values * self.cache_dtype.itemsize)

    @override
    def moved(self, target: Target, context: float) -> float:
        """As of `Contender`. Weights and cache count in the widths that this engine keeps them in."""
        weights, stored = read_bytes(target, 0, packed=False), sum(p.nbytes for p in target.parameters())
        cache = read_bytes(target, context, packed=False) - weights
        return weights * self.weights / stored + cache * self.cache_dtype.itemsize / target.dtype.itemsize


class CTranslate2(Peer):
    """`generate_batch` of CTranslate2, with a callback for every token. Its threads have seeds of their own."""

    engine, modules = "CTranslate2", ("ctranslate2",)

    def __init__(self, target: Target, slots: int, dtype: torch.dtype):
        """Load the target's weights. Raises NotAvailable if CTranslate2 does not support the model or the dtype."""
        super().__init__(target, slots, dtype)
        self.kind, there = str(dtype).removeprefix("torch."), self.module.get_supported_compute_types("cpu")
        if self.kind not in there:
            raise NotAvailable(f"CTranslate2 has no {self.kind} on this processor, it has {', '.join(sorted(there))}")
        self.check(target.config, slots, CTRANSLATE2)
        settings = {"compute_type": self.kind, "intra_threads": self.threads}
        self.load(partial(write_ctranslate2, target, self.kind), peer_sessions.ctranslate2_session, **settings)

    @override
    def __call__(self, prompt: list[int], new: int, sampling: Sampling, seed: int) -> TimedRun:
        # Its repetition penalty leaves out the prompt, so it is not among these.
        names = {"temperature": "sampling_temperature", "top_k": "sampling_topk", "top_p": "sampling_topp"}
        request = {"start_tokens": [[str(token) for token in prompt]], "max_length": new}
        request |= {"sampling_topk": int(sampling.greedy)} | translated(sampling, names, self.engine)
        return self.ask(request, len(prompt) + new - 1)

    @override
    def details(self) -> dict:
        return {"engine": f"ctranslate2 {self.module.__version__}, {self.kind}", "threads": self.threads}


class LlamaCpp(Peer):
    """llama.cpp's server, from `xllamacpp`, which streams each token as text. By its default the cache is in fp16."""

    engine, modules = "llama.cpp", ("xllamacpp", "gguf")

    def __init__(
        self, target: Target, slots: int, dtype: torch.dtype, file: Path | None = None, drafts: str | None = None
    ):
        """Load the target's weights, or its GGUF `file`. Raises NotAvailable if llama.cpp does not support the model.

        drafts: one of llama.cpp's own ways of speculation.
        """
        super().__init__(target, slots, dtype)
        self.cache_dtype, self.drafts = torch.float16, drafts is not None
        self.slots += -slots % CELLS
        name = self.architecture(target.config, slots)

        def fill(folder: Path) -> None:
            path = folder / peer_sessions.GGUF
            if file is None:
                write_gguf(path, target, name, dtype)
            else:
                copy_gguf(path, file, target.vocab)

        if file is not None:
            self.weights = file.stat().st_size
        how: dict[str, Any] = {"slots": self.slots, "threads": self.threads, "drafts": drafts}
        self.load(fill, peer_sessions.llama_cpp_session, **how)

    @classmethod
    def architecture(cls, config: ModelConfig, slots: int) -> str:
        """Return llama.cpp's name for models of this kind. Raises NotAvailable for a part that it does not read."""
        qwen2 = config.qkv_bias and not config.o_bias
        name = "gemma3" if config.sandwich_norms else "qwen3" if config.qk_norm else "qwen2" if qwen2 else "llama"
        cls.check(config, slots, LLAMA_CPP[name])
        if name == "gemma3" and config.sliding != tuple((layer + 1) % 6 != 0 for layer in range(config.layers)):
            raise NotAvailable(
                "in llama.cpp every sixth layer of a Gemma 3 sees all positions, and no other layer does"
            )
        return name

    @override
    def __call__(self, prompt: list[int], new: int, sampling: Sampling, seed: int) -> TimedRun:
        samplers = ["penalties", "temperature", "top_k", "top_p", "min_p"]  # transformers' order, which is ours
        request = {"prompt": prompt, "max_tokens": new, "seed": seed, "stream": True, "cache_prompt": False}
        request |= {"samplers": samplers, "repeat_last_n": self.slots, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        request |= translated(sampling, SHARED | {"repetition_penalty": "repeat_penalty"}, self.engine)
        if sampling.greedy:
            request |= {"samplers": ["penalties", "top_k"], "top_k": 1}
        return self.ask(request, self.slots)

    @override
    def details(self) -> dict:
        built_for = self.module.get_system_info().strip()
        return {"engine": f"xllamacpp {self.module.__version__}", "built_for": built_for, "threads": self.threads}


def peers_by_name(target, slots: int, file: Path | None = None) -> dict[str, Callable[[], Contender]]:
    """Return makers: ENGINE of the target's dtype, ENGINE-fp32, -fp16 and -bf16; llama.cpp-file and llama.cpp-ngram.

    slots: tokens of the longest text. file: the target's GGUF file, which the last two decode, ngram with drafts.
    """
    makers: dict[str, Callable[[], Contender]] = {}
    for name, engine in {"ctranslate2": CTranslate2, "llama.cpp": LlamaCpp}.items():
        makers[name] = partial(engine, target, slots, target.dtype)
        makers |= {f"{name}-{short}": partial(engine, target, slots, dtype) for short, dtype in DTYPES.items()}

    def of_file(drafts: str | None) -> Contender:
        if file is None:
            raise NotAvailable("the target is not read from a GGUF file")
        return LlamaCpp(target, slots, target.dtype, file, drafts)

    return makers | {"llama.cpp-file": partial(of_file, None), "llama.cpp-ngram": partial(of_file, "NGRAM_SIMPLE")}
