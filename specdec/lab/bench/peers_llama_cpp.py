"""llama.cpp as a contender, through the server in `xllamacpp`."""

import torch

from specdec.lab.bench.contenders import NotAvailable, TimedRun
from specdec.lab.bench.peer_sessions import GGUF, LlamaCppSession
from specdec.lab.bench.peers_common import INSTALL, Peer, shared_sampling
from specdec.lab.bench.peers_gguf import architecture, write_gguf
from specdec.model.target import Target
from specdec.structs import Sampling

CELLS = 256  # llama.cpp pads a context to so many tokens
NAMES = {"repetition_penalty": "repeat_penalty"} | {n: n for n in ("temperature", "top_k", "top_p", "min_p")}
# In the order of transformers, which is ours.
ORDER = ["penalties", "temperature", "top_k", "top_p", "min_p"]


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
            lambda folder: write_gguf(folder / GGUF, target, dtype, slots),
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
