"""Ways to decode that a benchmark compares: our engine, and `generate` of transformers in its several settings."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from specdec import kernels
from specdec.contracts import Drafter, TreePolicy
from specdec.engine.clock import Clock
from specdec.engine.engine import Engine
from specdec.engine.memory import weight_bytes
from specdec.engine.report import Observer, Reads, RoundReport
from specdec.lab.cost.memory import read_bytes, size_of, wait
from specdec.lab.cost.simulated_tau import SimulatedTau
from specdec.structs import Sampling, Verifier
from specdec.verify import sample_and_match


@dataclass
class TimedRun:
    """One decoding of one prompt. A step is a round, or without drafts a token. The first token is the prefill's."""

    tokens: list[int]
    seconds: float
    prefill_seconds: float  # time to the first token
    steps: list[float]  # seconds of each
    cache_bytes: int  # keys and values, as allocated


class NotAvailable(ValueError):
    """A contender that cannot take part, and why."""


class Contender:
    """Decodes one prompt of token ids into `new` tokens. No end-of-text token ends it."""

    ours = False  # decodes with this project's engine
    peer = False  # decodes with another engine than transformers, and with the target's own weights
    drafts = False  # its speed depends on what is accepted
    weights: int  # bytes, those of a drafter or an assistant included
    settle_seconds = 0.0  # for so long after its work its threads may spin

    def __call__(self, prompt: list[int], new: int, sampling: Sampling, seed: int) -> TimedRun:
        raise NotImplementedError

    def moved(self, target, context: float) -> float:
        """Bytes that plain decoding with its weights must read for the token behind `context` tokens."""
        return read_bytes(target, context, packed=self.ours)

    def details(self) -> dict:
        """Further entries of its rows, such as the version of an engine."""
        return {}


class _Marks(Observer):
    """When the engine's steps were told."""

    reads = Reads.TOKENS

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, report: RoundReport) -> None:
        self.times.append(time.perf_counter())


class Ours(Contender):
    """This project's engine, plainly or with a drafter."""

    ours = True

    def __init__(
        self,
        target,
        drafter: Drafter | None = None,
        tree: TreePolicy | None = None,
        verifier: Verifier = sample_and_match,
        compiled: bool = False,
    ):
        """compiled: rounds are (docs/compile.md), on a GPU of torch's operators in the place of our kernels."""
        # A simulated tau counts rounds that draft: nobody may leave one out.
        how = {"compile": compiled, "abstain": not isinstance(verifier, SimulatedTau)}
        self.operators = torch_operators if compiled and target.device.type == "cuda" else nullcontext
        try:
            with self.operators():
                self.engine = Engine(target, drafter, tree, verifier, **how)
        except ValueError as error:
            raise NotAvailable(str(error)) if compiled else error from None
        self.drafts = drafter is not None
        self.weights = weight_bytes(target, drafter)

    def __call__(self, prompt: list[int], new: int, sampling: Sampling, seed: int) -> TimedRun:
        marks = _Marks()
        with self.operators(), _Caches(self.engine) as caches:
            wait(self.engine.device)
            start = time.perf_counter()
            result = self.engine.generate(
                [prompt], max_new_tokens=new, sampling=sampling, seed=seed, eos=frozenset(), observer=marks
            )
            seconds = time.perf_counter() - start
        steps = [now - before for before, now in pairwise(marks.times)]
        return TimedRun(result.rows[0].tokens, seconds, result.prefill_seconds, steps, caches.bytes())


@contextmanager
def torch_operators() -> Iterator[None]:
    """Without our kernels for a while."""
    before = dict(zip(kernels.KERNELS, kernels.backends(), strict=True))
    kernels.use("torch")
    try:
        yield
    finally:
        for name, backend in before.items():
            kernels.use(backend, name)


class _Caches:
    """The caches of a decoding: the one that the target is first called with, and the drafter's."""

    def __init__(self, engine: Engine):
        self.engine, self.of_target = engine, None

    def __enter__(self) -> "_Caches":
        self.hook = self.engine.target.register_forward_pre_hook(self._keep)
        return self

    def _keep(self, _, args: tuple) -> None:
        self.of_target = args[1]
        self.hook.remove()

    def __exit__(self, *_) -> None:
        self.hook.remove()

    def bytes(self) -> int:
        drafter = self.engine.drafter
        caches = [self.of_target, None if drafter is None else drafter.cache]
        return sum(size_of(cache.layers) for cache in caches if cache is not None)


class Transformers(Contender):
    """`generate` of a model of transformers. attention: eager or sdpa; how: further arguments of `generate`."""

    def __init__(self, model: nn.Module, attention: str = "sdpa", assistant: nn.Module | None = None, **how):
        self.model, self.attention, self.how = model, attention, how
        self.weights, self.drafts = weight_bytes(model), "prompt_lookup_num_tokens" in how or assistant is not None
        model.generation_config.eos_token_id = None
        if assistant is not None:
            self.how = how | {"assistant_model": assistant}
            self.weights += weight_bytes(assistant)
            assistant.generation_config.eos_token_id = None

    def __call__(self, prompt: list[int], new: int, sampling: Sampling, seed: int) -> TimedRun:
        device = self.model.device
        self.model.set_attn_implementation(self.attention)
        ids = torch.tensor([prompt], device=device)
        torch.manual_seed(seed)
        wait(device)
        clock, start = Clock(device), time.perf_counter()
        runs = _Runs(self.model) if self.drafts else nullcontext(lambda: True)
        with runs as has_run:

            def step(*_) -> torch.Tensor:  # asked after every step whether to stop
                if has_run():
                    clock.mark("step")
                return torch.zeros(1, dtype=torch.bool, device=device)

            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new,
                pad_token_id=0,
                stopping_criteria=[step],
                return_dict_in_generate=True,
                **of_transformers(sampling),
                **self.how,
            )
        wait(device)
        seconds = time.perf_counter() - start
        times = [taken for _, taken in clock.intervals()]
        tokens = out.sequences[0, len(prompt) :].tolist()
        return TimedRun(tokens, seconds, times[0], times[1:], cache_size(out.past_key_values))


class _Runs:
    """A context whose value tells whether a model has run since it was asked the last time.

    transformers 5.17 asks whether to stop also of what was drafted, before the model has seen that: no step is over."""

    def __init__(self, model: nn.Module):
        self.model, self.ran = model, False

    def __enter__(self) -> Callable[[], bool]:
        self.hook = self.model.register_forward_hook(self._note)
        return self._has_run

    def _note(self, *_) -> None:
        self.ran = True

    def _has_run(self) -> bool:
        ran, self.ran = self.ran, False
        return ran

    def __exit__(self, *_) -> None:
        self.hook.remove()


# The settings that transformers' `generate` has too, under the same names.
SHARED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def of_transformers(sampling: Sampling) -> dict:
    """Sampling as arguments of transformers' `generate`. Raises NotAvailable for what it does not have."""
    if absent := sampling.active - set(SHARED):
        raise NotAvailable(f"transformers has no {' and no '.join(sorted(absent))}")
    if sampling.greedy:
        return {"do_sample": False, "repetition_penalty": sampling.repetition_penalty}
    return {"do_sample": True} | {name: getattr(sampling, name) for name in SHARED}


def cache_size(cache) -> int:
    """Bytes of a cache of transformers."""
    return sum(size_of(x for x in (layer.keys, layer.values) if x is not None) for layer in cache.layers)


def of_transformers_by_name(
    model: Callable[[], nn.Module], assistant: Callable[[], nn.Module] | None
) -> dict[str, Callable[[], Contender]]:
    """How to make transformers' contenders, by name. The models are made when they are first needed."""

    def compiled() -> Contender:
        from transformers import CompileConfig

        config = CompileConfig()
        config._compile_all_devices = True  # else `generate` compiles on GPUs only, and leaves the cache at that
        return Transformers(model(), cache_implementation="static", compile_config=config)

    def assisted() -> Contender:
        if assistant is None:
            raise NotAvailable("assisted generation needs a smaller model of the same tokens: give assistant=MODEL")
        return Transformers(model(), assistant=assistant())

    return {
        "eager": lambda: Transformers(model(), "eager"),
        "sdpa": lambda: Transformers(model(), "sdpa"),
        "static-compile": compiled,
        "prompt-lookup": lambda: Transformers(model(), prompt_lookup_num_tokens=10),
        "assisted": assisted,
    }
