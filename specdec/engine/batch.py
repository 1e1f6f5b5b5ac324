"""The rows that rounds compute. Sequences join a batch, and rows whose sequence has ended are dropped from it.

Compacting a batch moves its last rows to the places of those that have ended (`Survivors`), which costs a part of a
round. When the other rows end is unknown. So the rule is the online one of Dooly, Goldman and Scott ("TCP dynamic
acknowledgment delay", STOC 1998): carry ended rows until that has cost as much as compacting would. It costs at most
about twice as much as the best choice in hindsight.

The rule counts rounds and not seconds, so a run can be repeated. It takes a row's end into account one round late, as
a loop must that reads rounds late (`loop.Loop`). So both loops drop the same rows before the same rounds.
"""

from collections import abc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specdec.engine.adaptive import Policy
from specdec.engine.batch_tensors import BatchTensors, settings_for
from specdec.engine.controller import Controller
from specdec.engine.executor import Executor, Graph, bindings_of, buckets, copied
from specdec.engine.prefill import ChunkedPrefill
from specdec.engine.report import Clock, Reads, RoundReport, SilentClock
from specdec.engine.round import Round, RoundSettings
from specdec.engine.sequence import Sequence
from specdec.structs import Survivors

PRICE = 0.25  # Cost of compacting a batch, in rounds; measured 0.2 to 0.07 of a plain round of 4 to 32 rows.
MOST = 256  # captured rounds of one batch; the oldest goes first
VACANT = "vacant"


class Batch:
    """What rounds work on, and what one round leaves to the next.

    Row b holds `sequences[b]`. Rows whose sequence has ended stay until they are dropped; then the last rows take their
    places. New sequences join after the others. Captured rounds have one of a few widths: the last rows may be vacant.
    """

    def __init__(
        self,
        round_: Round,
        rows: int,
        room: int,
        clock: Clock | SilentClock,
        executor: Executor | None = None,
        widths: abc.Sequence[int] | None = None,
        *,
        overlap: bool = False,
        compact: bool = True,
        abstain: bool = True,
        adaptive: Policy | None = None,
    ):
        """Allocate `rows` rows of up to `room` tokens each, for rounds that `clock` times.

        executor: captures the rounds; None for eager rounds.
        widths: numbers of rows that rounds may have, ascending, the last is `rows`; None for any number.
        overlap: a round starts before the last one is read, so the device ends rows by itself.
        compact: drop rows that have ended. Rounds of given widths drop them as soon as a smaller width fits.
        abstain: draft no more levels than the drafter proposes; captured rounds draft all or none.
        adaptive: chooses the trees of rounds.
        """
        self.round, self.rows, self.room = round_, rows, room
        self.captures, self.widths, self.buckets = executor is not None, widths, buckets(room)
        self.executor: Any = executor  # an `Executor`, where rounds are captured
        self.abstain, self.overlap = abstain, overlap or self.captures
        self.late = overlap and round_.target.device.type != "cpu" if executor is None else executor.late
        self.price = 0.0 if widths else PRICE if compact else float("inf")
        self.tensors = BatchTensors(round_, rows, room, self.captures)
        self.cache, self.device = self.tensors.cache, round_.target.device
        self.cache.exact = not self.captures and (not overlap or round_.path == 1)  # then every row grows by one token
        self.graphs: dict[tuple, Graph] = {}  # captured rounds by bucket, kind of settings, reads and levels
        self.reads = Reads.LOGITS  # what is read of rounds
        self.begin(clock, adaptive)

    def begin(self, clock: Clock | SilentClock, adaptive: Policy | None = None, continuous: bool = False) -> None:
        """Drop all sequences. continuous: sequences will join and leave while others decode."""
        # Where sequences join captured rounds, there are two programs at least, and not one for each temperature.
        self.clock, self.table = clock, continuous and self.captures
        drafter, tree = self.round.drafter, self.round.policy
        self.controller = None if adaptive is None else Controller(adaptive, drafter, tree.steps)
        self.sequences: list[Sequence] = []
        self.carried = 0.0  # cost of the ended rows since the last compaction, in rounds, the next one included
        self.decoding = 0  # rows that still decode on the device; without overlap the host maintains it
        self.captured = False  # a round was captured in this step
        self.chunked: ChunkedPrefill | None = None  # prefills long prompts in parts
        self.tensors.clear()

    def going(self) -> list[Sequence]:
        """Return the sequences that the host does not know to have ended."""
        return [s for s in self.sequences if s.finish is None]

    def free(self) -> int:
        """Return the number of sequences that can join."""
        return self.rows - len(self.going())

    # Joining and leaving: only when all rounds have been read

    def admit(self, sequences: list[Sequence]) -> None:
        """Prefill sequences, no more than are free, and add to each its first token. This waits for the device."""
        self.tensors.bound(max((s.committed for s in self.going()), default=0))
        self._drop([s.finish is not None for s in self.sequences])
        first, prompts = len(self.sequences), [s.prompt for s in sequences]
        try:
            # Of these rows alone; their first tokens are counted.
            settings = settings_for(self.round, sequences, self.clock, self.table)
            root, state, made = self.round.prefill(prompts, self.cache, first, settings, self.controller, self.chunked)
            lists = {name: x.tolist() for name, x in made.items()}
            for i, (sequence, token) in enumerate(zip(sequences, root.tolist(), strict=True)):
                sequence.add([token], **{name: x[i] for name, x in lists.items()})
        except BaseException:  # remove the new rows from the caches
            self.tensors.undo_prefill(first)
            if first:
                self._hold(self.sequences)
            raise
        self.tensors.join(root, state)
        if self.controller is not None:
            self.controller.joined(first, len(sequences))
        self._hold(self.sequences + sequences, None if first else settings)
        self.tensors.refresh(self.sequences)
        self.decoding = len(self.going())
        self.clock.mark("prefill")
        # The next round is known, and to compile it may take long.
        if self._replays() and self.executor.any_bound and self.controller is None:
            for levels in (None,) if self._proposed(None) is None else (None, 0):
                self._graph(self.room, levels)

    def _hold(self, sequences: list[Sequence], settings: RoundSettings | None = None) -> None:
        """Hold these sequences, in as many rows as rounds may have. settings: theirs, if they are known."""
        width = self._width(len(sequences))
        vacant = [Sequence([0], 1, finish=VACANT) for _ in range(width - len(sequences))]
        self.sequences = sequences + vacant
        self.tensors.use(width)
        if settings is None or vacant:
            settings = settings_for(self.round, self.sequences, self.clock, self.table)
        self.tensors.take(settings)
        self.tensors.forget_settings({kind for _, kind, _, _ in self.graphs})

    def _width(self, rows: int) -> int:
        """Return the smallest number of rows that a round with so many sequences may have."""
        return rows if self.widths is None else next(width for width in self.widths if width >= rows)

    def _drop(self, over: list[bool]) -> Survivors | None:
        """Drop the rows that are over. The last of the others take their places."""
        if not any(over):
            return None
        survivors, self.carried = Survivors(over, self.device), 0.0
        self.sequences = survivors.of(self.sequences)
        if self.controller is not None:
            self.controller.compact(survivors)
        self.tensors.compact(survivors)
        return survivors

    def stop(self) -> None:
        """Stop the rows that the host knows to have ended. The device may not know it."""
        self.tensors.stop(self.sequences)

    def rest(self) -> None:
        """Drop all rows, none of which decodes, and what was stored for them."""
        self._drop([True] * len(self.sequences))
        if self.controller is not None:
            self.controller.forget()
        if not self.captures:
            self.tensors.settings = None

    # Rounds

    def launch(self, max_len: int, ended: abc.Collection[Sequence]) -> RoundReport:
        """Start the next round.

        max_len: at least the committed length of every sequence that still decodes.
        ended: the ended sequences that the decision to drop rows may use.
        """
        self.tensors.bound(max_len)
        if ended:
            self._shed([s in ended or s.finish == VACANT for s in self.sequences])
        if not self.overlap and (going := len(self.going())) != self.decoding:
            self.decoding = going
            self.stop()
        levels, tensors = None, self.tensors
        if self.controller is not None:
            levels, state = self.controller.begin(self.sequences, tensors.state, max_len)
            tensors.store(tensors.root, state)
        if self._replays():
            report = self._replay(min(max_len, self.room), 0 if self._most_proposed(levels) == 0 else levels)
            self.clock.mark("round")
        else:
            report = self._eager_round(levels)(max_len)
        report.rows, report.sampling, report.clock = self.sequences, tensors.settings.sampling, self.clock
        if self.controller is not None:
            self.controller.played(report)
        return report

    def _replays(self) -> bool:
        """Return whether the next round is captured: masks of grammars come from the host and make rounds eager."""
        return self.captures and not self.tensors.settings.masks

    def _shed(self, over: list[bool]) -> None:
        """Drop rows that are over if a smaller number of rows fits and they have been carried for long enough."""
        count = sum(over)
        if self._width(len(over) - count) == len(over):
            return
        self.carried += count / len(over)
        if self.carried < self.price:
            return
        penalties = self.tensors.settings.penalties
        survivors: Any = self._drop(over)
        self._hold(self.sequences)
        if penalties is not None and self.tensors.settings.penalties is not None:  # of rounds too that are not read yet
            self.tensors.settings.penalties.counts[: survivors.count] = penalties.counts[survivors.index]

    def _proposed(self, planned: int | None) -> Tensor | None:
        """Return the levels for which the drafter has something to propose [B]; None: all of them."""
        return self.round.proposed(self.tensors.state) if self.abstain and planned != 0 else None

    def _most_proposed(self, planned: int | None) -> int | None:
        """Return the maximum of `_proposed` over the rows that decode; None: all levels, or it would have to wait."""
        if self.late or (proposed := self._proposed(planned)) is None:
            return None
        return max((proposed * self.tensors.active).tolist())

    def _eager_round(self, planned: int | None) -> Callable[[int], RoundReport]:
        """Return the next round, of no more levels than its rows need."""
        settings = self.tensors.settings
        if self.captures:
            return self._round(replace(settings, clock=self.clock), planned, planned)
        bounds = [most for most in (planned, self._most_proposed(planned)) if most is not None]
        if settings.steps is not None:
            most = self.round.policy.steps
            asked = (most if s.steps is None else min(s.steps, most) for s in self.going())
            bounds.append(max(asked, default=0))
        return self._round(settings, planned, min(bounds, default=None))

    def _round(self, settings: RoundSettings, planned: int | None, most: int | None) -> Callable[[int], RoundReport]:
        """Return a round as a function of a bound of the committed length.

        planned: levels that an adaptive policy has chosen.
        most: levels of the tree, 0 for a plain round; None for all.
        """
        tensors, reads = self.tensors, self.reads

        def run(bound: int) -> RoundReport:
            tensors.bound(bound)
            levels = settings.steps
            if (proposed := self._proposed(most)) is not None:
                levels = proposed if levels is None else torch.minimum(proposed, levels)
            if levels is not None and planned is not None:
                levels = levels.clamp(max=planned)
            root, state, report = self.round.play(
                tensors.root, tensors.state, self.cache, tensors.active, settings, levels, most, self.controller
            )
            if self.overlap:
                tensors.settle(settings.eos, report.emission.tokens, report.emission.counts)
            tensors.store(root, state)
            return report.only(reads)

        return run

    def _replay(self, bound: int, levels: int | None) -> RoundReport:
        any_bound = self.executor.any_bound
        bucket = self.room if any_bound else next(size for size in self.buckets if size >= bound)
        graph = self._graph(bucket, levels)
        report = graph.replay(bound)
        if self.controller is not None and levels is not None and graph.eager and not report.eager:
            self.controller.policy.changed(len(self.sequences), levels)
        graph.eager = report.eager
        return report if any_bound else copied(report)

    def _graph(self, bucket: int, levels: int | None) -> Graph:
        """Return the captured round for this bound and so many levels. Capture it if there is none."""
        tensors, key = self.tensors, (bucket, self.tensors.kind, self.reads, levels)
        if key not in self.graphs:
            if len(self.graphs) == MOST:
                del self.graphs[next(iter(self.graphs))]
                tensors.forget_settings({kind for _, kind, _, _ in self.graphs})
            settings = replace(tensors.settings, masks=None)
            replay = self.executor.capture(self._round(settings, levels, levels), tensors.changing(), bucket)
            # Only now, as the warm-up may have made some of it.
            self.graphs[key], self.captured = Graph(replay, [settings, *bindings_of(self.round)]), True
            self.clock.mark("capture")
        return self.graphs[key]
