"""The loop over rounds. It reads each round at once, or one round late while the device already runs the next.

When it reads late, the device decides which rows have ended (`batch.Progress`), by the rule of `Sequence.add`. So a row
stands still from the same round on as when rounds are read at once: text, traces and the room that caches need are the
same. Only an end that a `Stop` brings is noticed a round late. That round of the row is void, and `Sequence` drops it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.engine.batch import Batch
from specdec.engine.report import RoundReport
from specdec.engine.round import RoundOutput
from specdec.engine.sequence import Sequence
from specdec.structs import Sampling, SamplingBatch
from specdec.threads import Threads

TOLD = "logprobs", "likely", "likely_logprobs"  # of `RoundOutput.to_read`, what a sequence may keep with its tokens


class Reader:
    """What rounds emitted, on its way to the host: two sets of buffers in turn, pinned if it comes from a GPU."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.buffers: list[list[Tensor]] = [[], []]
        self.events = [torch.cuda.Event(), torch.cuda.Event()] if self.cuda else []
        self.turn = 0

    def start(self, source: list[Tensor]) -> int:
        """Copy without waiting; the number returned is for `finish`. No more than two may be under way."""
        self.turn = 1 - self.turn
        if [x.shape for x in self.buffers[self.turn]] != [x.shape for x in source]:  # rows join and are dropped
            self.buffers[self.turn] = [torch.empty(x.shape, dtype=x.dtype, pin_memory=self.cuda) for x in source]
        for buffer, x in zip(self.buffers[self.turn], source, strict=True):
            buffer.copy_(x, non_blocking=True)
        if self.cuda:
            self.events[self.turn].record()
        return self.turn

    def finish(self, number: int) -> list[list]:
        """Wait for that copy only, and not for what was launched since."""
        if self.cuda:
            self.events[number].synchronize()
        return [buffer.tolist() for buffer in self.buffers[number]]


@dataclass
class _Launched:
    """A round that was launched and not read."""

    output: RoundOutput
    sequences: list[Sequence]
    sampling: Sampling | SamplingBatch
    copy: int = 0  # the number that `Reader.start` returned


class Loop:
    """The rounds of a batch, of which up to `lag` (0 or 1) are launched before the oldest is read.

    While a text obeys a grammar none are: what a round may emit follows from what the last one has emitted."""

    def __init__(self, batch: Batch, lag: int):
        self.batch, self.most = batch, lag
        self.reader = Reader(batch.device)
        self.pending: list[_Launched] = []
        self.threads = Threads(batch.device.type == "cpu")
        self.ended: set[Sequence] = set()  # the sequences that the host knew to have ended a round ago

    @property
    def lag(self) -> int:
        return 0 if self.most and any(s.matcher is not None for s in self.batch.sequences) else self.most

    def admit(self, sequences: list[Sequence]) -> None:
        """Let sequences join. Every round must have been read."""
        self.batch.admit(sequences)
        self.ended = self._over()

    def next(self) -> RoundReport | None:
        """Launch what is to be launched, read the oldest round and add its tokens to its sequences; None if there is
        none.

        A round that the sequences' limits show to be void is not launched, so what is launched in vain is one round,
        where a text ends early."""
        self.threads.adapt()
        while going := self.batch.going():
            launched = self._launch(going)
            if len(self.pending) > self.lag or not launched:
                return self._report(self.pending.pop(0), self.batch.captured)
        self.pending.clear()  # void: all their rows ended before
        return None

    def drain(self) -> RoundReport | None:
        """As `next`, without launching another round."""
        return self._report(self.pending.pop(0)) if self.pending else None

    def rest(self) -> None:
        """Nothing decodes any more, and nobody waits: hold nothing of what has ended."""
        self.ended = set()
        self.threads.restore()
        self.batch.rest()

    def _launch(self, going: list[Sequence]) -> bool:
        """Start a round for those that still decode, if it can give any of them a token."""
        # Every round under way gives each row a token at least.
        if not any(s.left > len(self.pending) for s in going):
            return False
        known = max(s.committed for s in going)
        # Which rows may be dropped is known a round late in both loops.
        over = self._over()
        ended, self.ended = (over, over) if self.lag else (self.ended, over)
        output = self.batch.launch(known + self.batch.round.path * len(self.pending), ended)
        rows = _Launched(output, self.batch.sequences, self.batch.settings.sampling)
        if self.lag:
            rows.copy = self.reader.start(list(output.to_read().values()))
        self.pending.append(rows)
        return True

    def _over(self) -> set[Sequence]:
        return {s for s in self.batch.sequences if s.finish is not None}

    def _report(self, launched: _Launched, captured: bool = False) -> RoundReport:
        """Read a round, and add what it emitted to its sequences. captured: a round was recorded in this step."""
        out, batch = launched.output, self.batch
        made = out.to_read()
        lists = self.reader.finish(launched.copy) if self.lag else [x.tolist() for x in made.values()]
        read = dict(zip(made, lists, strict=True))
        counts, levels, told = read["counts"], read.get("levels"), [read.get(name) for name in TOLD]
        emitted, accepted = [], []
        for i, (row, count) in enumerate(zip(launched.sequences, counts, strict=True)):
            if row.finish is not None:
                emitted.append([])
                accepted.append(0)
                continue
            row.trace.accepted.append(count - 1)
            row.trace.undrafted += out.nodes == 1 or (levels is not None and levels[i] == 0)
            kept = row.add(read["tokens"][i][:count], *(None if x is None else x[i] for x in told))
            row.trace.emitted.append(len(kept))
            emitted.append(kept)
            accepted.append(min(count - 1, len(kept)))
        if out.played is not None:
            batch.guide.learn(out.played, counts)
        batch.clock.mark("host")
        report = RoundReport(launched.sequences, emitted, accepted, launched.sampling, batch.clock)
        report.tree, report.verdict, report.logits, report.logprobs = out.tree, out.verdict, out.logits, told[0]
        report.levels, report.experts, report.nodes, report.captured = levels, out.experts, out.nodes, captured
        return report
