"""Ways to decode that a benchmark compares: our engine, and `generate` of transformers in its several settings.

Also what is measured: seconds of work on a device, memory, and the bytes that plain decoding must read.
"""

import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from specdec import ops
from specdec.contracts import Drafter, TreePolicy
from specdec.engine.engine import Engine
from specdec.engine.memory import weight_bytes
from specdec.engine.report import Clock, Observer, Reads, RoundReport
from specdec.lab.bench.random_weights import SimulatedTau
from specdec.model.hf_family import is_experts
from specdec.model.hf_target import CACHES
from specdec.ops.linear import bytes_read
from specdec.structs import Sampling, Verifier
from specdec.verify import sample_and_match

WARM_UPS, TRIALS = 3, 5
CPU_BYTES, GPU_BYTES = 1 << 28, 1 << 30


@dataclass
class TimedRun:
    """One decoding of one prompt. A step is a round, or one token without drafts. The prefill emits the first token."""

    tokens: list[int]
    seconds: float
    prefill_seconds: float  # time to the first token
    steps: list[float]  # seconds of each
    cache_bytes: int  # keys and values, as allocated


class NotAvailable(ValueError):
    """A contender cannot take part; the message gives the reason."""


class Contender:
    """Decodes one prompt of token ids into `new` tokens. No end-of-text token ends it."""

    ours = False  # decodes with this project's engine
    peer = False  # decodes with an engine other than transformers, and with the target's own weights
    drafts = False  # its speed depends on what is accepted
    weights: int  # bytes, including those of a drafter or an assistant
    settle_seconds = 0.0  # for this long after a run its threads may spin

    def __call__(self, prompt: list[int], new: int, sampling: Sampling, seed: int) -> TimedRun:
        """Decode `new` tokens after the prompt's token ids and return the tokens with their times."""
        raise NotImplementedError

    def moved(self, target, context: float) -> float:
        """Return the bytes that plain decoding with its weights must read for the token after `context` tokens."""
        return read_bytes(target, context, packed=self.ours)

    def details(self) -> dict:
        """Return further entries of its rows, such as the version of an engine."""
        return {}


class _Marks(Observer):
    """Notes the time of every step, and at the first one the bytes of the caches."""

    reads = Reads.TOKENS

    def __init__(self, engine: Engine):
        self.engine, self.cache_bytes = engine, 0
        self.times: list[float] = []

    def __call__(self, report: RoundReport) -> None:
        self.times.append(time.perf_counter())
        if not self.cache_bytes:
            caches = (self.engine.loop.batch.cache, getattr(self.engine.drafter, "cache", None))
            self.cache_bytes = sum(x.nbytes for cache in caches if cache is not None for x in cache.layers)


class Ours(Contender):
    """This project's engine, plain or with a drafter."""

    ours = True

    def __init__(
        self,
        target,
        drafter: Drafter | None = None,
        tree: TreePolicy | None = None,
        verifier: Verifier = sample_and_match,
        compiled: bool = False,
    ):
        """compiled: compile the rounds (docs/compile.md), on a GPU from torch's operators instead of our kernels."""
        # A simulated tau counts rounds that draft, so no row may abstain.
        how: dict[str, Any] = {"compile": compiled, "abstain": not isinstance(verifier, SimulatedTau)}
        self.operators = torch_operators if compiled and target.device.type == "cuda" else nullcontext
        try:
            with self.operators():
                self.engine = Engine(target, drafter, tree, verifier, **how)
        except ValueError as error:
            raise NotAvailable(str(error)) if compiled else error from None
        self.drafts, self.weights = drafter is not None, weight_bytes(target, drafter)

    @override
    def __call__(self, prompt: list[int], new: int, sampling: Sampling, seed: int) -> TimedRun:
        marks = _Marks(self.engine)
        with self.operators():
            wait(self.engine.device)
            start = time.perf_counter()
            how: dict[str, Any] = {"sampling": sampling, "seed": seed, "eos": frozenset(), "observer": marks}
            result = self.engine.generate([prompt], max_new_tokens=new, **how)
            seconds = time.perf_counter() - start
        steps = [now - before for before, now in pairwise(marks.times)]
        return TimedRun(result.rows[0].tokens, seconds, result.prefill_seconds, steps, marks.cache_bytes)


@contextmanager
def torch_operators() -> Iterator[None]:
    """Switch our kernels off for a while."""
    before = dict(zip(ops.KERNELS, ops.backends(), strict=True))
    ops.use("torch")
    try:
        yield
    finally:
        for name, backend in before.items():
            ops.use(backend, name)


# The settings that transformers' `generate` has too, under the same names.
SHARED = {name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}


def translated(sampling: Sampling, names: Mapping[str, str], engine: str) -> dict[str, Any]:
    """Return the settings that are not off, under the engine's `names`. Raises NotAvailable if it lacks one."""
    if absent := sampling.active - set(names):
        raise NotAvailable(f"{engine} has no {' and no '.join(sorted(absent))} as it is meant here")
    return {names[name]: getattr(sampling, name) for name in sampling.active}


class Transformers(Contender):
    """`generate` of a causal language model of transformers, whose EOS token is switched off."""

    def __init__(self, model: Any, attention: str = "sdpa", assistant: Any = None, **how):
        """attention: "eager" or "sdpa"; assistant: draft model; how: further arguments of `generate`."""
        self.model, self.attention, self.how = model, attention, how
        self.weights, self.drafts = weight_bytes(model), "prompt_lookup_num_tokens" in how or assistant is not None
        model.generation_config.eos_token_id = None
        if assistant is not None:
            self.how = how | {"assistant_model": assistant}
            self.weights += weight_bytes(assistant)
            assistant.generation_config.eos_token_id = None

    @override
    def __call__(self, prompt: list[int], new: int, sampling: Sampling, seed: int) -> TimedRun:
        translated(sampling, SHARED, "transformers")
        names = ("repetition_penalty",) if sampling.greedy else SHARED  # they override the generation config
        how: dict[str, Any] = {name: getattr(sampling, name) for name in names} | self.how
        device = self.model.device
        self.model.set_attn_implementation(self.attention)
        ids = torch.tensor([prompt], device=device)
        torch.manual_seed(seed)
        wait(device)
        clock, start = Clock(device), time.perf_counter()

        def step(*_) -> torch.Tensor:
            """Mark the end of a step."""
            clock.mark("step")
            return torch.zeros(1, dtype=torch.bool, device=device)

        how |= {"do_sample": not sampling.greedy, "pad_token_id": 0, "stopping_criteria": [step]}
        how |= {"attention_mask": torch.ones_like(ids), "return_dict_in_generate": True}
        out = self.model.generate(ids, max_new_tokens=new, **how)
        wait(device)
        seconds = time.perf_counter() - start
        first, *steps = (taken for _, taken in clock.intervals())
        layers = next(out[name] for name in CACHES if name in out).layers
        # Recurrent layers have neither.
        held = [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
        cache_bytes = sum(x.nbytes for x in held if x is not None)
        return TimedRun(out.sequences[0, len(prompt) :].tolist(), seconds, first, steps, cache_bytes)


def of_transformers_by_name(
    model: Callable[[], nn.Module], assistant: Callable[[], nn.Module] | None
) -> dict[str, Callable[[], Contender]]:
    """Return makers of transformers' contenders, by name. The models are made when they are first needed."""

    def compiled() -> Contender:
        from transformers import CompileConfig

        config: Any = CompileConfig()
        config._compile_all_devices = True  # otherwise `generate` compiles on GPUs only
        return Transformers(model(), cache_implementation="static", compile_config=config)

    def assisted() -> Contender:
        if assistant is None:
            raise NotAvailable("assisted generation needs a smaller model of the same tokens: give assistant=MODEL")
        return Transformers(model(), assistant=assistant())

    return {
        "eager": lambda: Transformers(model(), "eager"),
        "sdpa": lambda: Transformers(model()),
        "transformers": lambda: Transformers(model()),  # its default attention
        "static-compile": compiled,
        "prompt-lookup": lambda: Transformers(model(), prompt_lookup_num_tokens=10),
        "assisted": assisted,
    }


def wait(device: torch.device) -> None:
    """Wait until the device has finished what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds that the device works on `run`, after a few warm-ups."""
    times = []
    for _ in range(WARM_UPS + TRIALS):
        clock = Clock(device)
        run()
        clock.mark("run")
        times.append(clock.seconds()["run"])
    return statistics.median(times[WARM_UPS:])


def bandwidth(device: torch.device) -> float:
    """Return the memory's bytes/s: the faster of reading and copying a tensor beyond any cache, by torch's threads."""
    size = GPU_BYTES if device.type == "cuda" else CPU_BYTES
    source = torch.ones(size // 4, device=device)
    copy = torch.empty_like(source)
    read = size / device_seconds(source.sum, device)
    return max(read, 2 * size / device_seconds(lambda: copy.copy_(source), device))


def read_bytes(target, context: float, *, packed: bool = True) -> float:
    """Return the bytes that plain decoding of one row must read for the token after `context` tokens.

    These are all weights and the keys and values that the layers see. The embedding counts only if it is also the head,
    and of the experts of a layer as many as a token chooses. With `packed`, weights count as the engine reads them
    after packing (`specdec.ops.linear`), else as they are stored.
    """
    config, table = target.config, target.embed.weight
    read: dict[int, float] = {id(p): bytes_read(p) if packed else p.nbytes for p in target.parameters()}
    if chosen := target.chosen_experts():  # by layer, of the last forward
        for module in filter(is_experts, target.modules()):
            read |= {id(p): read[id(p)] * chosen[0].shape[-1] / target.experts for p in module.parameters()}
    if target.head.weight is not table:
        del read[id(table)]
    sliding = config.sliding or (False,) * config.layers
    seen = sum(min(context, config.window) if slides else context for slides in sliding)
    kv_heads, head_dim = target.cache_shape
    return sum(read.values()) + 2 * seen * kv_heads * head_dim * target.dtype.itemsize


def reset_peak(device: torch.device) -> int:
    """Measure the peak from here on. Return the bytes that are allocated on a GPU now; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def peak_bytes(device: torch.device, before: int) -> int:
    """Return the most that was allocated on a GPU beyond what `reset_peak` returned.

    On a CPU it is the peak resident set size since the process started, which never falls.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) - before
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
