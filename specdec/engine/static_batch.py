"""A batch whose rounds work on tensors that never move, so that they can be recorded and replayed (docs/graphs.md)."""

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

from torch import Tensor

from specdec.engine.clock import Clock
from specdec.engine.guide import Watch
from specdec.engine.round import Round, RoundOutput, RoundSettings
from specdec.engine.sequence import Sequence
from specdec.engine.static_rows import StaticRows
from specdec.structs import DraftTree, Verdict

STEP = 256  # slots: the least bucket, and what the room of caches is a multiple of
EMITTED = ("tokens", "n", "logprobs", "likely", "likely_logprobs")  # of `RoundOutput`, what the host reads of any round
MOST = 256  # graphs of one engine; the oldest goes first


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
    launched: bool = False  # instead, the last time


class StaticBatch(StaticRows):
    """A batch whose rounds are recorded, each for one width of the batch, and replayed."""

    signature: tuple = ()

    def __init__(self, round_: Round, widths: abc.Sequence[int], room: int, backend: Backend, clock: Clock):
        """widths: numbers of rows that rounds are recorded for, ascending."""
        super().__init__(round_, widths, room, clock)
        self.backend, self.buckets = backend, buckets(room)
        self.graphs: dict[tuple, Graph] = {}  # by bucket, kind, number of `eos` ids, what is read, and levels

    def admit(self, sequences: list[Sequence]) -> None:
        super().admit(sequences)
        # Which comes next is known, and to make it may take long.
        if self.backend.any_bound and self.guide is None and not self.masks:
            self._graph(self.room, None)

    def _take(self, settings: RoundSettings) -> None:
        super()._take(settings)
        self._forget_settings()

    def _forget_settings(self) -> None:
        """Drop the settings that are not in force and that no graph reads."""
        kinds, numbers = {key[1] for key in self.graphs}, {key[2] for key in self.graphs}
        self.kinds = {kind: kept for kind, kept in self.kinds.items() if kind in kinds or kind == self.kind}
        present = self.progress.eos.shape[1]
        self.all_eos = {number: kept for number, kept in self.all_eos.items() if number in numbers | {present}}

    def launch(self, max_len: int, ended: abc.Collection[Sequence]) -> RoundOutput:
        bound = min(max_len, self.room)
        self._bound(bound)
        if ended:
            self._shed(ended)
        levels = self._plan()
        if self.masks:  # on the host, so such rounds are not recorded
            masked = replace(self.settings, masks=self.masks, clock=self.clock)
            output = self._runner(masked, self.progress.eos, levels)(bound)
        else:
            output = self._replay(bound, levels)
            self.clock.mark("round")
        output = replace(output, nodes=self._nodes(levels))
        if self.guide is not None:
            self.guide.watched(output.watch, output.nodes, self.state)
            output.played = self.guide.played
        return output

    def _replay(self, bound: int, levels: int | None) -> RoundOutput:
        bucket = self.room if self.backend.any_bound else next(size for size in self.buckets if size >= bound)
        graph = self._graph(bucket, levels)
        output = graph.replay(bound)
        if self.guide is not None and graph.launched and not output.launched:
            self.guide.policy.changed(len(self.sequences), levels)
        graph.launched = output.launched
        if self.backend.any_bound:
            return output
        # The next round, which is launched before anybody looks at this one, writes over it.
        read = {name: vars(output)[name] for name in ("tree", "verdict", "logits", "watch")}
        return replace(output, **{name: _copy(value) for name, value in read.items() if value is not None})

    def _plan(self) -> int | None:
        before = self.state
        levels = super()._plan()
        if self.state is not before:  # the drafter has absorbed what was held for it
            before.hidden.copy_(self.state.hidden)
            before.readout.copy_(self.state.readout)
            self.state = before
        return levels

    def _nodes(self, levels: int | None) -> int:
        """Of a tree of so many levels; None: of all."""
        if levels is None:
            return self.round.nodes
        return self.round.rungs[levels - 1].num_draft_tokens if levels else 1

    def _graph(self, bucket: int, levels: int | None) -> Graph:
        """The graph for this bound of the committed length and so many levels, captured if it is not there."""
        key = bucket, self.kind, self.progress.eos.shape[1], self.reads, levels
        if key not in self.graphs:
            if len(self.graphs) == MOST:
                del self.graphs[next(iter(self.graphs))]
                self._forget_settings()
            self.graphs[key], self.captured = self._capture(bucket, levels), True
            self.clock.mark("capture")
        return self.graphs[key]

    def _capture(self, bucket: int, levels: int | None) -> Graph:
        settings, eos = self.settings, self.progress.eos
        itself = self._itself()
        replay = self.backend.capture(self._runner(settings, eos, levels, itself), self._static(settings), bucket)
        # Only now, as the warm-up may have made some of it.
        return Graph(replay, [settings, eos, itself, *self._bindings()])

    def _runner(
        self, settings: RoundSettings, eos: Tensor, levels: int | None, itself: Tensor | None = None
    ) -> Callable[[int], RoundOutput]:
        """A round of these settings, and of so many levels, as a function of a bound of the committed length."""
        reads, counting = self.reads, settings.steps
        # Without an ancestor mask a single row's only position would take `max_len` for the exact length.
        itself = self._itself() if itself is None else itself

        def run(bound: int) -> RoundOutput:
            self._bound(bound)
            watch = self.guide and Watch(self.guide.holds)
            counted = counting if counting is None or levels is None else counting.clamp(max=levels)
            root, state, output = self.round.play(
                self.root, self.state, self.cache, self.progress.active, settings, itself, counted, levels, watch
            )
            output.watch = watch
            self.progress.eos = eos
            self.progress.settle(output.tokens, output.n)
            self.root.copy_(root)
            if state is not None:
                self.state.hidden.copy_(state.hidden)
                self.state.readout.copy_(state.readout)
            return self._keep(output.only(reads))

        return run

    def _bound(self, bound: int) -> None:
        """No row that decodes has committed more than so many tokens."""
        self.cache.max_len = bound
        if self.draft_cache is not None:
            self.draft_cache.max_len = bound + 1  # that of a draft model holds token 0 too

    def _bindings(self) -> list:
        """What rounds read that is not the batch's: the next cache or `reset` freezes modules anew, and a longer one
        lets tables of positions grow."""
        modules = [m for part in (self.round.target, self.round.drafter) if part is not None for m in part.modules()]
        frozen = [vars(m).get(name) for m in modules for name in ("parts", "frozen", "adds")]
        buffers = [x for m in modules for x in m.buffers(recurse=False)]
        return [frozen, buffers, self.round.policy and dict(vars(self.round.policy))]

    def _keep(self, output: RoundOutput) -> RoundOutput:
        """What a round made, where it does not move."""
        kept = {}
        for name in EMITTED:
            if (made := getattr(output, name)) is not None:
                place = getattr(self.all_made, name)
                kept[name] = place[: len(made)] if made.ndim == 1 else place[: len(made), : made.shape[1]]
                kept[name].copy_(made)
        return replace(output, **kept)

    def _static(self, settings: RoundSettings) -> list[Tensor]:
        """What a round changes and the next one reads, the slots of caches aside."""
        kept = [self.root, self.progress.active, self.progress.left, self.cache.lens]
        kept += [self.state.hidden, self.state.readout] if self.state else []
        kept += [self.draft_cache.lens] if self.draft_cache else []
        return kept + ([settings.penalties.counts] if settings.penalties else [])


def _copy(value: DraftTree | Verdict | Watch | Tensor) -> DraftTree | Verdict | Watch | Tensor:
    """The same with copies of its tensors."""
    if isinstance(value, Tensor):
        return value.clone()
    parts = {f.name: vars(value)[f.name] for f in fields(value)}
    return replace(value, **{name: x.clone() for name, x in parts.items() if isinstance(x, Tensor)})
