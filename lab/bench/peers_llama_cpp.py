"""llama.cpp as a contender, through the server in `xllamacpp`."""

import re
import time
from pathlib import Path

import torch

from lab.bench.contenders import NotAvailable, TimedRun
from lab.bench.peer_process import Answer, Session
from lab.bench.peers_common import INSTALL, Peer, shared_sampling
from lab.bench.peers_gguf import architecture, write_gguf
from specdec.model.target import Target
from specdec.types import Sampling

FILE = "target.gguf"
CELLS = 256  # llama.cpp pads a context to so many tokens
NAMES = {"repetition_penalty": "repeat_penalty"} | {n: n for n in ("temperature", "top_k", "top_p", "min_p")}
# In the order of transformers, which is ours.
ORDER = ["penalties", "temperature", "top_k", "top_p", "min_p"]


class LlamaCppSession(Session):
    """The server of llama.cpp with one place for a text."""

    def __init__(self, folder: Path, settings: dict):
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(folder / FILE)
        params.n_ctx, params.n_parallel, params.fit_params, params.n_gpu_layers = settings["slots"], 1, False, 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
        params.cache_ram_mib = params.n_ctx_checkpoints = 0  # nothing of a prompt is kept for the next one
        params.verbosity = -1
        self.server = xllamacpp.Server(params)

    def __call__(self, request: dict) -> Answer:
        chunks: list[tuple[float, dict]] = []
        start = time.perf_counter()
        self.server.handle_completions(request, lambda chunk: chunks.append((time.perf_counter(), chunk)))
        end = time.perf_counter()
        marks, tokens = read_chunks(chunks)
        return Answer(tokens, marks, start, end)


class LlamaCpp(Peer):
    """llama.cpp's server, which hands over each token as a chunk of text. The cache is in fp16, as its own default is,
    and flash attention is its own choice."""

    engine = "llama.cpp"
    cache_dtype = torch.float16

    def __init__(self, target: Target, slots: int, dtype: torch.dtype):
        super().__init__(target, slots, dtype)
        try:
            import xllamacpp
        except ImportError as error:
            raise NotAvailable(f"llama.cpp cannot be imported ({error}): {INSTALL}") from None
        architecture(target.config, slots)
        self.version, self.built_for = xllamacpp.__version__, xllamacpp.get_system_info().strip()
        self.slots += -slots % CELLS
        self.load(
            lambda folder: write_gguf(folder / FILE, target, dtype, slots),
            LlamaCppSession,
            slots=self.slots,
            threads=self.threads,
        )

    def __call__(self, prompt: list[int], new: int, sampling: Sampling, seed: int) -> TimedRun:
        request = {"prompt": prompt, "max_tokens": new, "seed": seed, "stream": True, "cache_prompt": False}
        request |= {"samplers": ORDER, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_last_n": self.slots}
        request |= shared_sampling(sampling, NAMES, self.engine)
        if sampling.greedy:
            request |= {"samplers": ["penalties", "top_k"], "top_k": 1}
        return self.ask(request, self.cache_bytes(self.slots))

    def details(self) -> dict:
        return {"engine": f"xllamacpp {self.version}", "built_for": self.built_for, "threads": self.threads}


def read_chunks(chunks: list[tuple[float, dict]]) -> tuple[list[float], list[int]]:
    """When each token came, and which it was. Raises RuntimeError for an error that the server sends."""
    marks, tokens = [], []
    for when, chunk in chunks:
        if "choices" not in chunk:
            raise RuntimeError(f"llama.cpp: {chunk.get('error', chunk)}")
        found = [int(token) for token in re.findall(r"<(\d+)>", chunk["choices"][0]["text"])]
        marks += [when] * len(found)
        tokens += found
    return marks, tokens
