"""CUDA graphs of whole rounds: captured once for each shape, replayed without Python (docs/graphs.md).

A round can be captured because it is a function of tensors: all that it needs on the host are shapes, and of those the
only one that changes is how many slots of the caches are read, which goes in steps (`buckets`). Everything a round
keeps for the next one lies in tensors that never move.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from specdec.contracts import Drafter, DraftState
from specdec.engine.batch import RoundOutput, play
from specdec.engine.clock import SilentClock
from specdec.engine.overlap import Progress
from specdec.engine.sequence import Row
from specdec.kernels import backends
from specdec.model.cache import KVCache
from specdec.types import DraftTree, SamplingBatch, Verdict

STEP = 256  # slots: the least bucket, and what the room of caches is a multiple of
MOST = 64  # graphs of one engine; the oldest goes first
WARM_UPS = 2  # runs before a capture: kernels are compiled, libraries find their handles and workspaces


class Backend(Protocol):
    """Something that can record a function of static tensors, and run the record."""

    generator: torch.Generator  # whose numbers the record draws anew in each run

    def forget(self) -> None:
        """Nobody will run again what was captured so far."""

    def capture(self, run: Callable[[], Any], kept: Sequence[Tensor]) -> Callable[[], Any]:
        """A function that does again what `run` does, and returns what that returned: each time the same tensors.
        kept: all tensors that `run` changes and that live on; capturing leaves them, and the generator, as they are."""


class CudaGraphs:
    """Graphs of one engine, in one memory pool: they never run at the same time, and what a round leaves in the pool is
    copied out before the next."""

    def __init__(self, device: torch.device):
        self.device = device
        self.generator = torch.Generator(device)
        self.stream = torch.cuda.Stream(device)
        self.forget()

    def forget(self) -> None:
        # A pool whose last graph is gone cannot be captured into again.
        self.pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], Any], kept: Sequence[Tensor]) -> Callable[[], Any]:
        with torch.cuda.device(self.device):
            self._warm_up(run, kept)
            graph = torch.cuda.CUDAGraph()
            # A replay then draws what the generator would give next, and moves it on as the round itself does.
            graph.register_generator_state(self.generator)
            # Other threads, such as a data loader's, may go on using the device while this one captures.
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                made = run()

        def replay() -> Any:
            graph.replay()
            return made

        return replay

    def _warm_up(self, run: Callable[[], Any], kept: Sequence[Tensor]) -> None:
        """Run aside from the current stream, as torch asks for before a capture, and undo what that changed. What it
        wrote into caches lies behind the committed slots, where it is void."""
        before, numbers = [x.clone() for x in kept], self.generator.get_state()
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            for _ in range(WARM_UPS):
                run()
        current.wait_stream(self.stream)
        for x, old in zip(kept, before, strict=True):
            x.copy_(old)
        self.generator.set_state(numbers)


def buckets(room: int) -> list[int]:
    """Bounds of the committed length for which there are graphs: STEP, doubled again and again, and `room` at last."""
    sizes = []
    size = STEP
    while size < room:
        sizes.append(size)
        size *= 2
    return [*sizes, room]


def obstacle(target, drafter: Drafter | None) -> str | None:
    """Why rounds of these two cannot be captured, or None. Tree policies and verifiers always can: they keep nothing
    and never wait for the device."""
    for part in (target, drafter):
        if part is not None and not getattr(part, "capturable", False):
            name = type(part).__name__
            return f"{name} cannot be captured: it works with shapes or values that change from round to round"
    return None


def make_graphs(wanted: "bool | Backend | None", target, drafter: Drafter | None) -> "Graphs | None":
    """The graphs of an engine. wanted: False for none; None for graphs if this is a GPU and nothing stands against
    them; True, or a backend, for graphs or a ValueError that says why not."""
    device = target.embed.weight.device
    if wanted is False or (wanted is None and device.type != "cuda"):
        return None
    if why := obstacle(target, drafter):
        if wanted is None:
            return None
        raise ValueError(f"{why}; decode without graphs")
    if wanted is True and device.type != "cuda":
        raise ValueError(f"CUDA graphs need a GPU, and the target is on the {device.type}; decode without graphs")
    return Graphs(target, drafter, CudaGraphs(device) if wanted in (True, None) else wanted)


class Graphs:
    """The graphs of an engine, and the tensors that they work on. These are kept from call to call, and made anew for
    another number of rows, for longer texts than there was room for, and after weights have changed."""

    def __init__(self, target, drafter: Drafter | None, backend: Backend):
        self.target, self.drafter, self.backend = target, drafter, backend
        self.generator = backend.generator
        self.rounds: StaticRounds | None = None
        self.room = 0  # of the caches that are allocated next

    def prepare(self, batch: int, room: int, context: int) -> tuple[int, KVCache | None]:
        """For `batch` rows of up to `room` tokens: the room to make caches for, which may be more, and the target's
        cache as it is kept, empty, or None if there is none that fits."""
        kept = self.rounds
        if kept is not None and kept.batch == batch and kept.room >= room and kept.stamp == self._stamp():
            return kept.room, kept.cache.clear()
        if kept is not None:
            self.rounds = None
            self.backend.forget()
        self.room = max(room, min(-(-room // STEP) * STEP, context))
        return self.room, None

    def place_draft_cache(self) -> None:
        """Put the draft cache that is kept in the place of the one that `reset` has just made."""
        if self.rounds and self.rounds.draft_cache:
            self.drafter.cache = self.rounds.draft_cache.clear()

    def begin(
        self, engine, rows: Sequence[Row], root: Tensor, state: DraftState | None, cache: KVCache, **how
    ) -> "StaticRounds":
        """The rounds of one call, behind its prefill; how: see `StaticRounds.begin`."""
        if self.rounds is None:
            self.rounds = StaticRounds(engine, root, state, cache, self.room, self.backend, self._stamp())
        self.rounds.begin(rows, root, state, **how)
        return self.rounds

    def _stamp(self) -> tuple:
        """Changes when a tensor moves that a graph reads, or its values do, from which others may have been made."""
        modules = [part for part in (self.target, self.drafter) if isinstance(part, nn.Module)]
        tensors = [x for module in modules for x in (*module.parameters(), *module.buffers())]
        return backends(), tuple((x.data_ptr(), 0 if x.is_inference() else x._version) for x in tensors)


class StaticRounds:
    """Rounds of an engine over tensors that never move; `begin` and `launch` as in `late.Rounds`."""

    def __init__(self, engine, root, state, cache: KVCache, room: int, backend: Backend, stamp: tuple):
        self.engine = weakref.proxy(engine)  # which owns this: no cycle may keep caches of a dropped engine
        self.cache, self.room, self.backend, self.stamp = cache, room, backend, stamp
        self.batch, self.buckets = len(root), buckets(room)
        self.draft_cache: KVCache | None = engine.drafter and engine.drafter.cache
        self.root = torch.empty_like(root)
        self.state = state and DraftState(torch.empty_like(state.hidden), torch.empty_like(state.readout), state.head)
        self.progress = Progress(self.batch, root.device)
        path = engine.policy.steps + 1 if engine.policy else 1
        self.made = RoundOutput(root.new_zeros(self.batch, path), torch.zeros_like(root))
        self.made_logprobs = torch.zeros(self.batch, path, device=root.device)
        self.eos: dict[frozenset[int], Tensor] = {}
        self.hows: dict[tuple, tuple] = {}  # what rounds are played with: tensors that graphs read
        self.graphs: dict[tuple, Callable[[], RoundOutput]] = {}
        self.bindings: list = []  # holds what graphs read besides these and parameters, such as the tree's shape

    def begin(self, rows: Sequence[Row], root: Tensor, state: DraftState | None, *, eos, how: tuple, observed: bool):
        """A call's rows behind their prefill. eos: a frozenset of ids; how: as in `live.play`; observed: somebody looks
        at trees, verdicts and logits."""
        self.root.copy_(root)
        if state is not None:
            self.state.readout.copy_(state.readout)
            self.state.hidden.copy_(state.hidden)
        self.progress.begin(rows)
        sampling, generator, self.clock, penalties, logprobs = how
        assert generator is self.backend.generator
        kind = (_kind(sampling), penalties is not None, logprobs)
        if kind not in self.hows:
            self.hows[kind] = sampling, generator, SilentClock(), penalties, logprobs
        else:
            kept = self.hows[kind]
            _refill(kept[0], sampling)
            _refill(kept[3], penalties)
        if eos not in self.eos:
            self.eos[eos] = torch.tensor(sorted(eos), dtype=torch.int64, device=root.device)
        self.key = kind, eos, observed

    def launch(self, max_len: int) -> RoundOutput:
        bucket = next(size for size in self.buckets if size >= min(max_len, self.room))
        key = bucket, *self.key
        if key not in self.graphs:
            if len(self.graphs) == MOST:
                del self.graphs[next(iter(self.graphs))]
            self.graphs[key] = self._capture(*key)
        made = self.graphs[key]()
        self.clock.mark("round")
        if made.tree is None:
            return made
        # The next round, which is launched before anybody looks at this one, writes over it.
        return replace(made, tree=_copy(made.tree), verdict=_copy(made.verdict), logits=made.logits.clone())

    def _capture(self, bucket: int, kind: tuple, eos: frozenset[int], observed: bool) -> Callable[[], RoundOutput]:
        engine, how, ends = self.engine, self.hows[kind], self.eos[eos]
        # Bound parts hold tensors of their own, and are bound anew by the next cache or `reset`.
        self.bindings += [vars(m).get(name) for m in _modules(engine) for name in ("parts", "frozen")]
        # Without an ancestor mask a single row's only position would take the bound for the exact length.
        itself = torch.ones(self.batch, 1, 1, dtype=torch.bool, device=self.root.device)
        self.bindings += [itself, engine.policy and dict(vars(engine.policy))]
        plain = {"ancestors": itself} if engine.drafter is None else {}

        def run() -> RoundOutput:
            self.cache.max_len = bucket
            if self.draft_cache is not None:
                self.draft_cache.max_len = bucket + 1  # that of a draft model holds token 0 too
            progress = self.progress
            root, state, made = play(engine, self.root, self.state, self.cache, progress.active, how, **plain)
            progress.settle(made.tokens, made.n, ends)
            self.root.copy_(root)
            if state is not None:
                self.state.readout.copy_(state.readout)
                self.state.hidden.copy_(state.hidden)
            self.made.tokens.copy_(made.tokens)
            self.made.n.copy_(made.n)
            if made.logprobs is not None:
                self.made_logprobs.copy_(made.logprobs)
            result = replace(self.made, logprobs=None if made.logprobs is None else self.made_logprobs)
            return replace(result, tree=made.tree, verdict=made.verdict, logits=made.logits) if observed else result

        return self.backend.capture(run, self._kept(how))

    def _kept(self, how: tuple) -> list[Tensor]:
        """What a round changes and the next one reads, the slots of caches aside."""
        penalties = how[3]
        kept = [self.root, self.progress.active, self.progress.left, self.cache.lens]
        kept += [self.state.readout, self.state.hidden] if self.state else []
        kept += [self.draft_cache.lens] if self.draft_cache else []
        return kept + ([penalties.counts] if penalties else [])


def _modules(engine) -> list[nn.Module]:
    return [m for part in (engine.target, engine.drafter) if isinstance(part, nn.Module) for m in part.modules()]


def _kind(sampling) -> Any:
    """What of a sampling is part of the program: a `Sampling`, and of `SamplingBatch` which filters it has."""
    return (sampling.any_cut, sampling.any_min_p) if isinstance(sampling, SamplingBatch) else sampling


def _refill(kept: Any, new: Any) -> None:
    """Copy the tensors of an object, such as `Penalties`, into those of another of its kind; None has none."""
    for name, value in vars(new).items() if new is not None else ():
        if isinstance(value, Tensor):
            getattr(kept, name).copy_(value)


def _copy(value: DraftTree | Verdict) -> DraftTree | Verdict:
    """The same with copies of its tensors."""
    parts = {f.name: getattr(value, f.name) for f in fields(value)}
    return replace(value, **{name: x.clone() for name, x in parts.items() if isinstance(x, Tensor)})
