"""Continuous batching: one thread owns an engine, and lets jobs join and leave it between rounds.

Jobs come from any thread by a queue. As rows become free, requests take turns, first come first served, each with one
of its jobs. The engine's thread reports to jobs. A job's tokens do not depend on other jobs, as each row draws by its
own seed.
"""

import logging
import threading
import time
from collections import abc
from collections.abc import Callable
from typing import Any

import torch

from specdec.engine.engine import Engine
from specdec.engine.report import Observer, Reads, RoundReport
from specdec.engine.sequence import REASONS, Sequence, make_sequence
from specdec.serve.jobs import Delta, Job
from specdec.serve.metrics import Metrics, count, drafted_of
from specdec.serve.refusal import Refusal

LOG = logging.getLogger(__name__)
CHUNKS = {"cpu": 256, "cuda": 2048}  # tokens of prompts between two rounds: measured, and as vLLM (docs/serve.md)


class Scheduler:
    """Serves jobs with an engine until it is closed. After `start`, no other code may use the engine."""

    def __init__(
        self,
        engine: Engine,
        *,
        rows: int = 8,
        room: int = 2048,
        queue: int = 256,
        prefill_chunk: int | None = None,
        max_seconds: float | None = None,
        model: str | None = None,
        observer: Observer | None = None,
    ):
        """Reserve the engine's memory. Raises ValueError if that is not possible.

        rows: jobs that run at a time. room: tokens of the longest text with its prompt. queue: jobs that may wait for a
        row. prefill_chunk: prompt tokens between two rounds, with padding; a longer prompt is read in parts; None:
        `CHUNKS` of the device. max_seconds: a waiting or running job ends with an error after so long. model: its name
        in metrics. observer: gets a report of every step.
        """
        self.engine, self.rows, self.queue_limit = engine, rows, queue
        self.prefill_chunk = prefill_chunk or CHUNKS[engine.device.type]
        # Nothing is copied for reports of eager rounds; of replayed ones what the host knows is enough.
        self.reads = Reads.TREES if engine.graphs is None else Reads.TOKENS
        self.max_seconds, self.observer = max_seconds, observer
        if observer is not None:
            self.reads = max(self.reads, observer.reads)
        self.reserved: dict[str, Any] = {"rows": rows, "room": room, "reads": self.reads, "part": self.prefill_chunk}
        engine.reserve(**self.reserved)
        self.room = engine.room
        self.steps = engine.policy.steps if engine.policy else 0
        self.metrics = Metrics(model or engine.target.name or "target", self.steps)
        # A step's deltas -> their jobs; another thread may do it.
        self.deliver: Callable[[list[Delta]], None] = hand_out
        self.changed = threading.Condition()
        self.queue: list[Job] = []
        self.running: dict[Sequence, Job] = {}
        self.served: object = None  # the request that got a row last
        self.prefilled = False  # the last step was a prefill
        self.rests = True  # the engine has nothing left to do, and has dropped the state of finished rows
        self.since: float | None = None  # when the last step ended; None if the engine has been idle since
        self.deadline: float | None = None  # when closed: until then, running jobs may continue
        self.broken = ""  # why nothing can be decoded any more
        self.thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # For every thread

    def start(self) -> None:
        """Start the thread that owns the engine."""
        self.thread.start()

    def submit(self, jobs: abc.Sequence[Job]) -> None:
        """Queue all jobs of a request or none. Raises ValueError for invalid jobs, `Refusal` if full or closed."""
        for job in jobs:
            self._check(job)
        with self.changed:
            if self.deadline is not None or self.broken:
                raise Refusal(self.broken or "the server stops", status=503)
            under_way = len(self.queue) + len(self.running)
            if under_way + len(jobs) > self.rows + self.queue_limit:
                wanted = f"{self.rows} sequences are decoded and {self.queue_limit} may wait: try again later"
                raise Refusal(wanted, status=429, code="queue_full")
            request = object()
            for job in jobs:
                job.request, job.arrived = request, time.perf_counter()
            self.queue += jobs
            self.changed.notify()

    def cancel(self, jobs: abc.Sequence[Job]) -> None:
        """Abort jobs: each ends with the step in flight and the reason 'abort', unless it has ended."""
        with self.changed:
            for job in jobs:
                job.unwanted = True
            self.changed.notify()

    def close(self, grace: float = 0.0) -> None:
        """Accept no more jobs, end queued ones, and give running ones `grace` seconds, without waiting (`join`)."""
        with self.changed:
            deadline = time.perf_counter() + grace
            self.deadline = deadline if self.deadline is None else min(deadline, self.deadline)
            self.changed.notify()

    def serves(self) -> bool:
        """Whether jobs are taken and decoded."""
        return self.thread.is_alive() and self.deadline is None and not self.broken

    def join(self, timeout: float | None = None) -> None:
        """Wait until a closed scheduler has ended all jobs."""
        if self.thread.ident is not None:
            self.thread.join(timeout)

    def _check(self, job: Job) -> None:
        size: dict[str, Any] = {"vocab": self.engine.target.config.vocab, "context": self.room}
        make_sequence(job.prompt, job.max_new_tokens, job.sampling, job.seed, None, None, frozenset(), **size)

    # The engine's thread

    def _run(self) -> None:
        if self.engine.device.type == "cuda":
            torch.cuda.set_device(self.engine.device)  # each thread has its own; Triton launches on it
        try:
            while self._turn():
                pass
        except Exception as error:
            LOG.exception("the engine's thread ends")
            self._break(f"decoding has failed: {error}")

    def _turn(self) -> bool:
        """One step of the engine, and what is between two steps. False when everything has ended and is closed."""
        with self.changed:
            while self.rests and not (self.queue or self.running or self.deadline is not None):
                self.since = None
                self.changed.wait()
            leaving = self._take_leaving()
            if not self.engine.waiting:
                self._admit()
        self._send([Delta(job, finish="error" if why else "abort", error=why, status=s) for job, why, s in leaving])
        if self.rests and not self.running:
            return self.deadline is None
        try:
            report = self.engine.step()
        except Exception as error:
            LOG.exception("a step of the engine has failed")
            self._start_over(f"decoding has failed: {error}")
            return True
        self.rests = report is None
        if report is not None:
            self.prefilled = report.prefill
            if self.observer is not None:
                self.observer(report)
            self._tell(report)
        before, self.since = self.since, time.perf_counter()
        is_round = report is not None and not (report.prefill or report.captured)
        if is_round and before is not None and self.engine.adaptive is not None:
            self.engine.adaptive.took(self.since - before)  # with the work between two rounds
        return True

    def _take_leaving(self) -> list[tuple[Job, str, int]]:
        """Remove the jobs that end now, with the lock held. Returns each with message and status; '' if cancelled."""
        now, everyone = time.perf_counter(), [*self.queue, *self.running.values()]
        leaving = [(job, "", 499) for job in everyone if job.unwanted]
        if self.max_seconds is not None:
            why = f"the request took more than {self.max_seconds:g} seconds"
            leaving += [(job, why, 504) for job in everyone if now - job.arrived > self.max_seconds]
        if self.deadline is not None:
            others = everyone if now >= self.deadline else self.queue
            leaving += [(job, "the server stops", 503) for job in others]
        leaving = list({id(one[0]): one for one in reversed(leaving)}.values())  # each by its first reason
        gone = {id(job) for job, *_ in leaving}
        self.queue = [job for job in self.queue if id(job) not in gone]
        for job, *_ in leaving:
            if job.sequence is not None:
                self.engine.abort(job.sequence)
                del self.running[job.sequence]
        return leaving

    def _admit(self) -> None:
        """Give the engine queued jobs, as rows and budget allow, with the lock held. A round separates two prefills."""
        if self.prefilled and self.running:
            return
        joining: list[Job] = []
        longest = 0
        while (job := self._next(joining)) is not None:
            longest = max(longest, len(job.prompt))
            if joining and longest * (len(joining) + 1) > self.prefill_chunk:
                break
            joining.append(job)
            self.queue.remove(job)
            self.served = job.request
            self.queue.sort(key=lambda other: other.request == self.served)  # the others of its request go last
        for job in joining:
            job.sequence = self.engine.add(job.prompt, **job.how)
            self.running[job.sequence] = job
            self.metrics.of("vllm:request_queue_time_seconds").observe(time.perf_counter() - job.arrived)

    def _next(self, joining: list[Job]) -> Job | None:
        """Return the queued job that gets the next row; None if none may.

        Requests take turns, so one with many choices does not delay the others. The last free row is for a new request.
        """
        having = [job.request for job in (*self.running.values(), *joining)]
        allowed = self.queue
        if len(having) >= self.rows - 1:
            allowed = [job for job in self.queue if len(having) < self.rows and job.request not in having]
        return min(allowed, key=lambda job: job.request is self.served, default=None)

    def _tell(self, report: RoundReport) -> None:
        """Send what a step has emitted, and let those go that have ended."""
        now, deltas, metrics = time.perf_counter(), [], self.metrics
        with metrics.lock:
            drafts = drafted_of(report, self.steps)
            count(metrics, report, [row in self.running for row in report.rows], drafts, self.engine.prefixes)
            progress = zip(report.rows, report.emitted, report.accepted, drafts, strict=True)
            for sequence, tokens, accepted, drafted in progress:
                job = self.running.get(sequence)
                if job is None:  # ended before, its row not yet dropped
                    continue
                first = len(sequence.tokens) - len(tokens)
                logprobs, likely = sequence.logprobs and sequence.logprobs[first:], sequence.likely[first:]
                marks = [place < accepted for place in range(len(tokens))]
                delta = Delta(job, tokens, logprobs, likely, sequence.finish, drafted=drafted, marks=marks)
                deltas.append(delta)
                since, name = (job.heard, "inter_token_latency") if job.heard else (job.arrived, "time_to_first_token")
                metrics.of(f"vllm:{name}_seconds").observe(now - since)
                job.heard = now
                if sequence.finish is not None:
                    del self.running[sequence]
            self._book(deltas)
        self.deliver(deltas)

    def _send(self, deltas: list[Delta]) -> None:
        if deltas:
            self._book(deltas)
            self.deliver(deltas)

    def _book(self, deltas: list[Delta]) -> None:
        """Count the ended jobs and the remaining ones."""
        now, metrics = time.perf_counter(), self.metrics
        with metrics.lock:
            for delta in deltas:
                if delta.finish is not None:
                    metrics.of("vllm:request_success", finished_reason=REASONS.get(delta.finish, delta.finish)).inc()
                    metrics.of("vllm:e2e_request_latency_seconds").observe(now - delta.job.arrived)
            metrics.of("vllm:num_requests_running").set(len(self.running))
            metrics.of("vllm:num_requests_waiting").set(len(self.queue))
            metrics.of("vllm:kv_cache_usage_perc").set(len(self.running) / self.rows)

    # When decoding fails

    def _start_over(self, why: str) -> None:
        """End all running jobs with an error, and restart the engine with the waiting ones."""
        failed = list(self.running.values())
        self.running.clear()
        self._send([Delta(job, finish="error", error=why) for job in failed])
        self.engine.reserve(**self.reserved)
        self.prefilled, self.rests = False, True

    def _break(self, why: str) -> None:
        """Nothing can be decoded any more: say so to all that wait, and to all that come."""
        with self.changed:
            self.broken = why
            failed = [*self.running.values(), *self.queue]
            self.running.clear()
            self.queue.clear()
        self._send([Delta(job, finish="error", error=why) for job in failed])


def hand_out(deltas: list[Delta]) -> None:
    """Pass a step's results to the jobs."""
    for delta in deltas:
        delta.job.tell(delta)
