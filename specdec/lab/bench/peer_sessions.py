"""The other engines, each in a process of its own.

Engines bring their own pools of threads, and the threads of an idle pool spin while they wait for work. In one process,
CTranslate2, llama.cpp and torch made each other 1.5 to 6 times slower (docs/log.md). This module does not import torch:
no engine needs it, and its import takes ten times as long as an engine's own.
"""

import os
import re
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from multiprocessing import parent_process

GGUF = "target.gguf"  # the file that llama.cpp's session loads
Timed = tuple[list[int], float, float, list[float]]  # tokens, seconds, seconds of the prefill, seconds of each step
_session: Callable[[dict], Timed]  # of this process


def end_with_parent() -> None:
    """Let this process end when its parent does, however that ends."""
    threading.Thread(target=lambda: (parent_process().join(), os._exit(1)), daemon=True).start()


def load(session: Callable[..., Callable[[dict], Timed]], folder: str, settings: dict) -> None:
    """Load the model in the folder, which is removed afterwards."""
    global _session
    _session = session(folder, **settings)


def decode(request: dict) -> Timed:
    return _session(request)


def timed(tokens: list[int], marks: list[float], start: float, end: float) -> Timed:
    """marks: when each token came."""
    first = marks[0] if marks else end
    return tokens, end - start, first - start, [after - before for before, after in pairwise(marks)]


class CTranslate2Session:
    """A generator of CTranslate2.

    Its products are oneDNN's instead of MKL's: on two threads MKL's threads and its own wait for each other, and a
    token takes ten times as long (docs/log.md). On one thread oneDNN's are as fast."""

    def __init__(self, folder: str, **settings):
        os.environ.setdefault("CT2_USE_MKL", "0")  # read when it is imported
        import ctranslate2

        self.generator = ctranslate2.Generator(folder, "cpu", **settings)

    def __call__(self, request: dict) -> Timed:
        marks, tokens = [], []

        def step(result) -> bool:
            marks.append(time.perf_counter())
            tokens.append(result.token_id)
            return False  # go on

        start = time.perf_counter()
        self.generator.generate_batch(include_prompt_in_result=False, end_token=[], callback=step, **request)
        return timed(tokens, marks, start, time.perf_counter())


class LlamaCppSession:
    """The server of llama.cpp with one slot."""

    def __init__(self, folder: str, slots: int, threads: int):
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = os.path.join(folder, GGUF)
        params.n_ctx, params.n_parallel, params.fit_params, params.n_gpu_layers = slots, 1, False, 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.cache_ram_mib = params.n_ctx_checkpoints = 0  # prompts are not cached
        params.verbosity = -1
        self.server = xllamacpp.Server(params)

    def __call__(self, request: dict) -> Timed:
        chunks: list[tuple[float, dict]] = []
        start = time.perf_counter()
        self.server.handle_completions(request, lambda chunk: chunks.append((time.perf_counter(), chunk)))
        end = time.perf_counter()
        return timed(*read_chunks(chunks), start, end)


def read_chunks(chunks: list[tuple[float, dict]]) -> tuple[list[int], list[float]]:
    """Return the tokens that the chunks of text name, and when each came.

    Raises:
        RuntimeError: For an error that the server sends.
    """
    marks, tokens = [], []
    for when, chunk in chunks:
        if "choices" not in chunk:
            raise RuntimeError(f"llama.cpp: {chunk.get('error', chunk)}")
        found = [int(token) for token in re.findall(r"<(\d+)>", chunk["choices"][0]["text"])]
        marks += [when] * len(found)
        tokens += found
    return tokens, marks
