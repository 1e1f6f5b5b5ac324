"""A batch whose rounds work on tensors that never move, so that they can be recorded and replayed (docs/graphs.md)."""

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from specdec.contracts import DraftState
from specdec.engine.batch import Batch, Progress
from specdec.engine.clock import Clock, SilentClock
from specdec.engine.masks import Masks
from specdec.engine.round import Round, RoundOutput, RoundSettings
from specdec.engine.sequence import MOST_LIKELY, Sequence
from specdec.model.cache import KVCache
from specdec.types import DraftTree, SamplingBatch, Verdict

STEP = 256  # slots: the least bucket, and what the room of caches is a multiple of
EMITTED = ("tokens", "n", "logprobs", "likely", "likely_logprobs")  # of `RoundOutput`, what the host reads of any round
MOST = 64  # graphs of one engine; the oldest goes first


class Backend(Protocol):
    """Something that can record a function of static tensors, and run the record."""

    any_bound: bool  # a record serves all bounds, and returns new tensors; else one, and the same tensors each time
    late: bool  # a record may still be running on the device when it returns

    def forget(self) -> None:
        """Nobody will run again what was captured so far."""

    def capture(self, run: Callable[[int], Any], kept: abc.Sequence[Tensor], bound: int) -> Callable[[int], Any]:
        """A function that does again what `run` does with this bound of the committed length, or, with `any_bound`,
        with any up to it, and returns what that returned. kept: all tensors that `run` changes and that live on;
        capturing leaves them as they are."""


def buckets(room: int) -> list[int]:
    """Bounds of the committed length for which there are graphs: STEP, doubled again and again, and `room` at last."""
    sizes = []
    size = STEP
    while size < room:
        sizes.append(size)
        size *= 2
    return [*sizes, room]


@dataclass
class Graph:
    """A captured round. It knows the addresses of what it reads, so that must live as long as it does."""

    replay: Callable[[int], RoundOutput]
    bindings: list  # what it reads besides the tensors of the batch, and parameters


class StaticBatch(Batch):
    """A batch whose rounds work on tensors that never move, so that they can be recorded. Rows are never dropped: the
    row of a sequence that has ended is taken by the next that joins."""

    signature: tuple = ()

    def __init__(self, round_: Round, rows: int, room: int, backend: Backend, clock: Clock):
        super().__init__(round_, rows, room, clock, overlap=True, compact=False)
        self.backend, self.buckets = backend, buckets(room)
        self.draft_cache: KVCache | None = round_.drafter and round_.drafter.cache
        self.root = torch.zeros(rows, dtype=torch.int64, device=self.device)
        self.made = made_of(rows, round_.path, min(MOST_LIKELY, round_.target.vocab), self.device)
        self.progress = Progress(self._vacant(), self.device)
        self.eos: dict[int, Tensor] = {}  # by their number, [B,E]
        self.masks: Masks | None = None
        self.kinds: dict[tuple, RoundSettings] = {}  # what rounds are played with: tensors that graphs read
        self.graphs: dict[tuple, Graph] = {}  # by bucket, kind, number of `eos` ids and what is read

    def _vacant(self) -> list[Sequence]:
        return [Sequence([0], 1, finish="vacant") for _ in range(self.rows)]

    def begin(self, clock: Clock) -> None:
        """Forget all sequences."""
        self.clock, self.sequences = clock, self._vacant()
        self.cache.clear(self.rows)
        if self.draft_cache is not None:  # another engine may have let the drafter make one of its own
            self.round.drafter.cache = self.draft_cache.clear(self.rows)

    def admit(self, sequences: list[Sequence]) -> None:
        free = [b for b, s in enumerate(self.sequences) if s.finish is not None][: len(sequences)]
        self.sequences, settings = self.sequences[:], None  # rounds that are not read yet hold the list as it was
        for row, count in runs(free):
            joining, sequences = sequences[:count], sequences[count:]
            root, state, settings = self._prefill(joining, row)
            self.sequences[row : row + count] = joining
            self.root[row : row + count] = root
            if state is not None:
                self._place(state, slice(row, row + count))
        self._refresh(settings if count == self.rows else self._settings(self.sequences))
        self.clock.mark("prefill")
        if self.backend.any_bound:  # which graph comes next is known, and to make it may take long
            self._graph(self.room)

    def rest(self) -> None:
        """Rows stay where graphs read them."""

    def _place(self, state: DraftState, rows: slice) -> None:
        if self.state is None:
            hidden, readout = (x.new_zeros(self.rows, *x.shape[1:]) for x in (state.hidden, state.readout))
            self.state = DraftState(hidden, readout)
        self.state.head = state.head
        self.state.hidden[rows], self.state.readout[rows] = state.hidden, state.readout

    def _refresh(self, settings: RoundSettings) -> None:
        """Copy the settings of all rows, and what else follows from the sequences, into the tensors that graphs
        read."""
        progress = Progress(self.sequences, self.device)
        self.progress.active.copy_(progress.active)
        self.progress.left.copy_(progress.left)
        width = progress.eos.shape[1]
        self.progress.eos = self.eos.setdefault(width, progress.eos)
        self.progress.eos.copy_(progress.eos)
        self.kind = (
            _kind(settings.sampling), settings.penalties is not None, settings.logprobs, settings.likely,
            settings.steps is not None,
        )  # fmt: skip
        if self.kind not in self.kinds:
            self.kinds[self.kind] = replace(settings, clock=SilentClock(), masks=None)
        else:
            kept = self.kinds[self.kind]
            _refill(kept.sampling, settings.sampling)
            _refill(kept.penalties, settings.penalties)
            _refill(kept.noise, settings.noise)
            if settings.steps is not None:
                kept.steps.copy_(settings.steps)
        self.settings, self.masks = self.kinds[self.kind], settings.masks
        self._forget_settings()

    def _forget_settings(self) -> None:
        """Drop the settings that are not in force and that no graph reads."""
        kinds, widths = {key[1] for key in self.graphs}, {key[2] for key in self.graphs}
        self.kinds = {kind: kept for kind, kept in self.kinds.items() if kind in kinds or kind == self.kind}
        present = self.progress.eos.shape[1]
        self.eos = {width: kept for width, kept in self.eos.items() if width in widths or width == present}

    def launch(self, max_len: int, ended: abc.Collection[Sequence]) -> RoundOutput:
        bound = min(max_len, self.room)
        if self.masks:  # on the host, so such rounds are not recorded
            masked = replace(self.settings, masks=self.masks, clock=self.clock)
            return self._runner(masked, self.progress.eos)(bound)
        bucket = self.room if self.backend.any_bound else next(size for size in self.buckets if size >= bound)
        output = self._graph(bucket).replay(bound)
        output.nodes = self.round.nodes
        self.clock.mark("round")
        if self.backend.any_bound:
            return output
        # The next round, which is launched before anybody looks at this one, writes over it.
        read = {name: vars(output)[name] for name in ("tree", "verdict", "logits")}
        return replace(output, **{name: _copy(value) for name, value in read.items() if value is not None})

    def _graph(self, bucket: int) -> Graph:
        """The graph for this bound of the committed length, captured if it is not there."""
        key = bucket, self.kind, self.progress.eos.shape[1], self.reads
        if key not in self.graphs:
            if len(self.graphs) == MOST:
                del self.graphs[next(iter(self.graphs))]
                self._forget_settings()
            self.graphs[key] = self._capture(bucket)
            self.clock.mark("capture")
        return self.graphs[key]

    def _capture(self, bucket: int) -> Graph:
        settings, eos = self.settings, self.progress.eos
        itself = self._itself()
        replay = self.backend.capture(self._runner(settings, eos, itself), self._static(settings), bucket)
        # Only now, as the warm-up may have made some of it.
        return Graph(replay, [settings, eos, itself, *self._bindings()])

    def _runner(
        self, settings: RoundSettings, eos: Tensor, itself: Tensor | None = None
    ) -> Callable[[int], RoundOutput]:
        """A round of these settings, as a function of a bound of the committed length."""
        reads = self.reads
        # Without an ancestor mask a single row's only position would take `max_len` for the exact length.
        itself = self._itself() if itself is None else itself

        def run(bound: int) -> RoundOutput:
            self.cache.max_len = bound
            if self.draft_cache is not None:
                self.draft_cache.max_len = bound + 1  # that of a draft model holds token 0 too
            root, state, output = self.round.play(
                self.root, self.state, self.cache, self.progress.active, settings, itself, settings.steps
            )
            self.progress.eos = eos
            self.progress.settle(output.tokens, output.n)
            self.root.copy_(root)
            if state is not None:
                self.state.hidden.copy_(state.hidden)
                self.state.readout.copy_(state.readout)
            return self._keep(output.only(reads))

        return run

    def _bindings(self) -> list:
        """What rounds read that is not the batch's: the next cache or `reset` freezes modules anew, and a longer one
        lets tables of positions grow."""
        modules = [m for part in (self.round.target, self.round.drafter) if part is not None for m in part.modules()]
        frozen = [vars(m).get(name) for m in modules for name in ("parts", "frozen")]
        buffers = [x for m in modules for x in m.buffers(recurse=False)]
        return [frozen, buffers, self.round.policy and dict(vars(self.round.policy))]

    def _keep(self, output: RoundOutput) -> RoundOutput:
        """What a round made, where it does not move."""
        kept = {name: getattr(self.made, name) for name in EMITTED if getattr(output, name) is not None}
        for name, place in kept.items():
            place.copy_(getattr(output, name))
        return replace(output, **kept)

    def _static(self, settings: RoundSettings) -> list[Tensor]:
        """What a round changes and the next one reads, the slots of caches aside."""
        kept = [self.root, self.progress.active, self.progress.left, self.cache.lens]
        kept += [self.state.hidden, self.state.readout] if self.state else []
        kept += [self.draft_cache.lens] if self.draft_cache else []
        return kept + ([settings.penalties.counts] if settings.penalties else [])


def made_of(rows: int, path: int, likely: int, device: torch.device) -> RoundOutput:
    """Places for what a round emits."""
    tokens, logprobs = torch.zeros(rows, path, dtype=torch.int64, device=device), torch.zeros(rows, path, device=device)
    own = tokens.new_zeros(rows, path, likely), logprobs.new_zeros(rows, path, likely)
    return RoundOutput(tokens, tokens.new_zeros(rows), logprobs, *own)


def runs(places: abc.Sequence[int]) -> list[tuple[int, int]]:
    """Ascending places as (first, count) of those that follow each other."""
    found: list[tuple[int, int]] = []
    for place in places:
        if found and sum(found[-1]) == place:
            found[-1] = found[-1][0], found[-1][1] + 1
        else:
            found.append((place, 1))
    return found


def _kind(sampling) -> Any:
    """What of a sampling is part of the program: a `Sampling`, and of `SamplingBatch` which filters it has."""
    return sampling.program if isinstance(sampling, SamplingBatch) else sampling


def _refill(kept: Any, new: Any) -> None:
    """Copy the tensors of an object, such as `Penalties`, into those of another of its kind; None has none."""
    for name, value in vars(new).items() if new is not None else ():
        if isinstance(value, Tensor):
            vars(kept)[name].copy_(value)


def _copy(value: DraftTree | Verdict | Tensor) -> DraftTree | Verdict | Tensor:
    """The same with copies of its tensors."""
    if isinstance(value, Tensor):
        return value.clone()
    parts = {f.name: vars(value)[f.name] for f in fields(value)}
    return replace(value, **{name: x.clone() for name, x in parts.items() if isinstance(x, Tensor)})
