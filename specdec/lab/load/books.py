"""Whether a server's counters say what its engine has done, and whether anything is left at the end of all requests."""

import asyncio
import gc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from specdec.engine.report import Observer, Reads, RoundReport
from specdec.engine.sequence import Sequence as Row
from specdec.lab.load.crowd import Case, Heard, Text
from specdec.serve.jobs import REASONS, Job
from specdec.serve.metrics import Metrics
from specdec.serve.scheduler import Scheduler


@dataclass
class Entry:
    """What a sequence was given."""

    prompt: int
    tokens: int = 0
    accepted: int = 0
    finish: str | None = None  # None: somebody did not want more


class Ledger(Observer):
    """Keeps books of all sequences by their seeds, from what the engine reports. It does not hold the sequences."""

    reads = Reads.TOKENS

    def __init__(self) -> None:
        self.entries: dict[tuple[int, int], Entry] = {}

    def __call__(self, report: RoundReport) -> None:
        for row, emitted, accepted in zip(report.rows, report.emitted, report.accepted, strict=True):
            if report.prefill:
                self.entries[row.seed] = Entry(len(row.prompt))
            if row.seed in self.entries and emitted:
                entry = self.entries[row.seed]
                entry.tokens += len(emitted)
                entry.accepted += accepted
                entry.finish = REASONS.get(row.finish, row.finish)

    def total(self, name: str) -> int:
        return sum(getattr(entry, name) for entry in self.entries.values())


def wrong_books(
    metrics: Metrics, ledger: Ledger, cases: Sequence[Case], heard: Sequence[Heard], must: Sequence[Sequence[Text]]
) -> list[str]:
    """Where counters, engine and the responses' usage do not agree. The ledger is of these cases alone."""
    wrong = []

    def agree(what: str, told: float, right: float) -> None:
        if told != right:
            wrong.append(f"{what}: {told:g}, and it is {right:g}")

    value, entries = metrics.value, ledger.entries
    agree("generation tokens", value("vllm:generation_tokens"), ledger.total("tokens"))
    agree("prompt tokens", value("vllm:prompt_tokens"), ledger.total("prompt"))
    agree("accepted tokens", value("vllm:spec_decode_num_accepted_tokens"), ledger.total("accepted"))
    ends = [entry.finish for entry in entries.values()]
    ended = {why: value("vllm:request_success", finished_reason=why) for why in ("stop", "length", "abort", "error")}
    for reason in ("stop", "length", "error"):
        agree(f"ended by {reason}", ended[reason], ends.count(reason))
    agree("ended", value("vllm:e2e_request_latency_seconds_count"), sum(ended.values()))
    answered = {case.number: one for case, one in zip(cases, heard, strict=True) if one.whole and case.way != "wrong"}
    used = sum(one.usage["completion_tokens"] for one in answered.values())
    gone = sum(entry.tokens for (number, _), entry in entries.items() if number not in answered)
    agree("tokens of responses and of clients that went away", used + gone, value("vllm:generation_tokens"))
    for case, texts in zip(cases, must, strict=True):
        if case.number in answered:
            for index, text in enumerate(texts):
                entry = entries.get((case.number, index), Entry(0))
                agree(f"case {case.number} choice {index}", entry.tokens, len(text.ids))
    for status in sorted({case.status for case in cases if case.way == "wrong"}):
        right = sum(case.status == status and case.way == "wrong" for case in cases)
        agree(f"refused with {status}", value("specdec:requests_refused", status=status), right)
    return wrong


async def settled(scheduler: Scheduler, seconds: float = 60.0) -> bool:
    """Wait until nothing runs and nobody waits; False if that takes longer than so many seconds."""
    for _ in range(int(seconds / 0.01)):
        if not scheduler.running and not scheduler.queue:
            await asyncio.sleep(0.1)  # answers are sent, and their tasks end
            return True
        await asyncio.sleep(0.01)
    return False


def live_bytes(objects: Iterable) -> int:
    """Bytes of the tensors among all objects of a process. Packed weights count nothing, nor do a compiler's tensors
    without contents, which are of classes of their own."""
    tensors = [x for x in objects if type(x) in (torch.Tensor, torch.nn.Parameter) and x.layout == torch.strided]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


@dataclass(frozen=True)
class Left:
    """What a server holds, garbage collected."""

    free: int  # rows
    waiting: int  # sequences that wait for a row
    jobs: int  # objects of the process
    sequences: int
    tensor_bytes: int  # of the process; packed weights and what is kept of prompts aside

    @classmethod
    def of(cls, scheduler: Scheduler) -> "Left":
        gc.collect()
        objects = gc.get_objects()
        jobs, rows = (sum(type(x) is kind for x in objects) for kind in (Job, Row))
        waiting, prefixes = len(scheduler.queue) + len(scheduler.engine.waiting), scheduler.engine.prefixes
        kept = prefixes.bytes if prefixes else 0
        return cls(scheduler.engine.loop.batch.free(), waiting, jobs, rows, live_bytes(objects) - kept)
