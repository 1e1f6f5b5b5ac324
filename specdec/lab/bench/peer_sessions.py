"""The other engines themselves, as they live in processes of their own.

Nothing here imports torch, which no engine needs: its import takes a process ten times as long as the engine's own.
"""

import os
import re
import time
from pathlib import Path

from specdec.lab.bench.peer_process import Answer, Session

GGUF = "target.gguf"  # the file that llama.cpp's session loads


class CTranslate2Session(Session):
    """A generator of CTranslate2.

    Its products are oneDNN's, not MKL's: on two threads MKL's threads and its own wait for each other, and a token
    takes ten times as long (docs/log.md). On one thread oneDNN's are as fast."""

    def __init__(self, folder: Path, settings: dict):
        os.environ.setdefault("CT2_USE_MKL", "0")  # read when it is imported
        import ctranslate2

        self.generator = ctranslate2.Generator(str(folder), "cpu", **settings)

    def __call__(self, request: dict) -> Answer:
        marks, tokens = [], []

        def step(result) -> bool:
            marks.append(time.perf_counter())
            tokens.append(result.token_id)
            return False  # go on

        start = time.perf_counter()
        self.generator.generate_batch(include_prompt_in_result=False, end_token=[], callback=step, **request)
        return Answer(tokens, marks, start, time.perf_counter())


class LlamaCppSession(Session):
    """The server of llama.cpp with one place for a text."""

    def __init__(self, folder: Path, settings: dict):
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(folder / GGUF)
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
