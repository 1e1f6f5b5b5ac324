"""The loop over rounds. It reads each round at once, or one round late while the device already runs the next.

When it reads late, the device decides which rows have ended (`BatchTensors.settle`), by the rule of `Sequence.add`. So
a row stops in the same round as when rounds are read at once: text, traces and the room that caches need are the same.
Only an end by a `Stop` is noticed a round late. That round of the row is void, and `Sequence` drops it.
"""

import torch
from torch import Tensor

from specdec.engine.batch import Batch
from specdec.engine.report import Emission, RoundReport
from specdec.engine.sequence import Sequence
from specdec.threads import Threads


class Reader:
    """Copies what rounds emit to the host: two sets of buffers in turn, pinned if the tensors are on a GPU."""

    def __init__(self, device: torch.device):
        """Begin with empty buffers for results of this device."""
        self.cuda = device.type == "cuda"
        self.buffers: list[list[Tensor]] = [[], []]
        self.events = [torch.cuda.Event(), torch.cuda.Event()] if self.cuda else []
        self.turn = 0

    def start(self, source: list[Tensor]) -> int:
        """Copy without waiting. Return a number for `finish`. No more than two copies may be under way."""
        self.turn = 1 - self.turn
        if [x.shape for x in self.buffers[self.turn]] != [x.shape for x in source]:  # rows join and are dropped
            self.buffers[self.turn] = [torch.empty(x.shape, dtype=x.dtype, pin_memory=self.cuda) for x in source]
        for buffer, x in zip(self.buffers[self.turn], source, strict=True):
            buffer.copy_(x, non_blocking=True)
        if self.cuda:
            self.events[self.turn].record()
        return self.turn

    def finish(self, number: int) -> list[list]:
        """Wait for that copy only, and not for what was started since."""
        if self.cuda:
            self.events[number].synchronize()
        return [buffer.tolist() for buffer in self.buffers[number]]


class Loop:
    """The rounds of a batch, of which up to `lag` (0 or 1) are started before the oldest is read.

    While a text obeys a grammar, the lag is 0: what a round may emit depends on what the last one has emitted.
    """

    def __init__(self, batch: Batch, lag: int):
        """Begin without rounds. lag: rounds that may be started before the oldest is read, 0 or 1."""
        self.batch, self.most = batch, lag
        self.reader = Reader(batch.device)
        self.pending: list[tuple[RoundReport, int]] = []  # rounds that were not read, with their numbers in the reader
        self.threads = Threads(batch.device.type == "cpu")
        self.ended: set[Sequence] = set()  # the sequences that the host knew to have ended a round ago
        self.lost = False  # a round is played or read: what it emits is lost if that fails

    @property
    def lag(self) -> int:
        """Rounds that may be started before the oldest is read."""
        return 0 if self.most and any(s.matcher is not None for s in self.batch.sequences) else self.most

    def admit(self, sequences: list[Sequence]) -> None:
        """Let sequences join. Every round must have been read."""
        self.batch.admit(sequences)
        self.ended = self._over()

    def next(self) -> RoundReport | None:
        """Launch the next round, read the oldest one and add its tokens to its sequences; None if there is none.

        A round that is void by the sequences' limits is not started, so at most one round is started in vain, where a
        text ends early.
        """
        self.threads.adapt()
        self.lost = True
        while going := self.batch.going():
            started = self._launch(going)
            if len(self.pending) > self.lag or not started:
                return self._read(*self.pending.pop(0), captured=self.batch.captured)
        self.pending.clear()  # void: all their rows ended before
        self.lost = False
        return None

    def drain(self) -> RoundReport | None:
        """As `next`, without launching another round."""
        return self._read(*self.pending.pop(0)) if self.pending else None

    def rest(self) -> None:
        """Drop what has ended: nothing decodes and no request waits."""
        self.ended = set()
        self.threads.restore()
        self.batch.rest()

    def _launch(self, going: list[Sequence]) -> bool:
        """Start a round for the sequences that still decode, if it can emit a token for any of them."""
        # Every round under way emits at least one token for each row.
        if not any(s.left > len(self.pending) for s in going):
            return False
        known = max(s.committed for s in going)
        # Which rows may be dropped is known a round late in both loops.
        over = self._over()
        ended, self.ended = (over, over) if self.lag else (self.ended, over)
        report = self.batch.launch(known + self.batch.round.path * len(self.pending), ended)
        copy = self.reader.start(list(report.emission.present().values())) if self.lag else 0
        self.pending.append((report, copy))
        return True

    def _over(self) -> set[Sequence]:
        return {s for s in self.batch.sequences if s.finish is not None}

    def _read(self, report: RoundReport, copy: int, captured: bool = False) -> RoundReport:
        """Read a round, and add its tokens to its sequences. captured: as in `RoundReport`."""
        self.lost, made = True, report.emission.present()
        lists = self.reader.finish(copy) if self.lag else [x.tolist() for x in made.values()]
        read = Emission(**dict(zip(made, lists, strict=True)))
        report.emission, report.levels, report.logprobs, report.captured = read, read.levels, read.logprobs, captured
        report.emitted, report.accepted = [], []
        fields = [read.logprobs, read.likely, read.likely_logprobs]
        for i, (row, count) in enumerate(zip(report.rows, read.counts, strict=True)):
            if row.finish is not None:
                report.emitted.append([])
                report.accepted.append(0)
                continue
            row.trace.accepted.append(count - 1)
            row.trace.undrafted += report.nodes == 1 or (read.levels is not None and read.levels[i] == 0)
            added = row.add(read.tokens[i][:count], *(None if x is None else x[i] for x in fields))
            row.trace.emitted.append(len(added))
            report.emitted.append(added)
            report.accepted.append(min(count - 1, len(added)))
        if report.plan is not None and self.batch.controller is not None:
            self.batch.controller.learn(report, read.counts)
        self.batch.clock.mark("host")
        self.lost = False
        return report
