"""The other engines, each in a process of its own.

Engines have their own thread pools, and idle threads spin while they wait for work. In one process, CTranslate2,
llama.cpp and torch made each other 1.5 to 6 times slower (docs/log.md). This module does not import torch: no engine
needs it, and its import takes ten times as long as an engine's own.
"""

import os
import re
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from multiprocessing import parent_process
from typing import Any

GGUF = "target.gguf"  # the file that llama.cpp loads
Marks = list[tuple[float, list[int]]]  # when tokens came, and which
Session = Callable[[dict], Marks]
_session: Session  # of this process


def end_with_parent() -> None:
    """Let this process end when its parent does, however that ends."""
    parent: Any = parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def load(session: Callable[..., Session], folder: str, settings: dict) -> None:
    """Load the model in the folder, which is removed afterwards."""
    global _session
    _session = session(folder, **settings)


def decode(request: dict) -> tuple[list[int], float, float, list[float]]:
    """Return tokens, seconds, seconds of the prefill, and seconds of each step."""
    start = time.perf_counter()
    marks = _session(request)
    end = time.perf_counter()
    times = [when for when, tokens in marks for _ in tokens]
    steps = [after - before for before, after in pairwise(times)]
    return [token for _, tokens in marks for token in tokens], end - start, (times or [end])[0] - start, steps


def ctranslate2_session(folder: str, **settings) -> Session:
    """A generator of CTranslate2.

    Its products are oneDNN's instead of MKL's: on two threads MKL's threads and its own wait for each other, and a
    token takes ten times as long (docs/log.md). On one thread oneDNN's are as fast.
    """
    os.environ.setdefault("CT2_USE_MKL", "0")  # read when it is imported
    import ctranslate2

    generator = ctranslate2.Generator(folder, "cpu", **settings)

    def session(request: dict) -> Marks:
        marks: Marks = []

        def note(step: Any) -> bool:
            marks.append((time.perf_counter(), [step.token_id]))
            return False  # do not stop

        generator.generate_batch(callback=note, include_prompt_in_result=False, end_token=[], **request)
        return marks

    return session


def llama_cpp_session(folder: str, slots: int, threads: int, drafts: str | None = None) -> Session:
    """The server of llama.cpp with one slot. drafts: its own way of speculation, as its enum names it."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = os.path.join(folder, GGUF)
    params.n_ctx, params.n_parallel, params.fit_params, params.n_gpu_layers = slots, 1, False, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cache_ram_mib = params.n_ctx_checkpoints = 0  # prompts are not cached
    params.verbosity = -1
    if drafts is not None:
        params.speculative.types = [xllamacpp.common_speculative_type[f"COMMON_SPECULATIVE_TYPE_{drafts}"]]
    server = xllamacpp.Server(params)

    def session(request: dict) -> Marks:
        chunks: list[tuple[float, dict]] = []
        server.handle_completions(request, lambda chunk: chunks.append((time.perf_counter(), chunk)))
        return [(when, tokens_of(chunk)) for when, chunk in chunks]

    return session


def tokens_of(chunk: dict) -> list[int]:
    """Return the tokens that a chunk of text names. Raises RuntimeError for an error that the server sends."""
    if "choices" not in chunk:
        raise RuntimeError(f"llama.cpp: {chunk.get('error', chunk)}")
    return [int(token) for token in re.findall(r"<(\d+)>", chunk["choices"][0]["text"])]
