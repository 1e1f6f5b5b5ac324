"""Jobs that come, run together and go: each gets the text that it has alone, gets its end once, and leaves nothing
allocated."""

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from itertools import pairwise

import pytest
from helpers import tiny_drafter, tiny_target
from tape import Tape

from specdec import Engine, Sampling
from specdec.engine.adaptive import Fixed
from specdec.engine.report import RoundReport
from specdec.serve.jobs import Delta, Job
from specdec.serve.refusal import Refusal
from specdec.serve.scheduler import Scheduler
from specdec.trees import DynamicTree

EOS = frozenset({4})


class Heard:
    """A job and all its deltas."""

    def __init__(self, **asked):
        self.deltas: list[Delta] = []
        self.over = threading.Event()
        self.at_end: Callable[[Heard], object] = lambda heard: None
        self.job = Job(tell=self.tell, eos=asked.pop("eos", EOS), **asked)

    def tell(self, delta: Delta) -> None:
        self.deltas.append(delta)
        if delta.finish is not None:
            self.at_end(self)
            self.over.set()

    @property
    def tokens(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.tokens]

    @property
    def finish(self) -> str:
        """Its finish reason, which only the last delta has."""
        assert [delta.finish is not None for delta in self.deltas] == [False] * (len(self.deltas) - 1) + [True]
        return self.deltas[-1].finish

    def wait(self) -> "Heard":
        assert self.over.wait(300), "its end was never reported"
        return self


def at_first(heard: Heard, do: Callable[[], object]) -> None:
    """Do something when a job gets its first token, before the next step."""

    def tell(delta: Delta) -> None:
        first = not heard.deltas
        heard.tell(delta)
        if first:
            do()

    heard.job.tell = tell


def gives_up(number: int) -> bool:
    """Whether a job's client goes away at its first token. None of these has ended by then."""
    return number % 12 == 7


def mixed(number: int) -> Heard:
    """The number-th of many jobs that differ in everything."""
    draw = random.Random(number)
    samplings = (
        Sampling(), Sampling(0.8), Sampling(1.0, top_k=5), Sampling(1.2, top_p=0.9, repetition_penalty=1.3),
        Sampling(frequency_penalty=0.7),
    )  # fmt: skip
    return Heard(
        prompt=[draw.randrange(1, 17) for _ in range(draw.randrange(1, 14))],
        max_new_tokens=15 if gives_up(number) else draw.randrange(1, 16),
        sampling=samplings[number % len(samplings)],
        seed=(number, draw.randrange(3)),
        eos=frozenset() if number % 3 else EOS,
        logprobs=number % 4 == 0,
    )


def alone(target, job: Job) -> tuple[list[int], str]:
    """Tokens and end of a job that is decoded by itself, plainly."""
    how = {"sampling": job.sampling, "seed": [job.seed], "eos": job.eos, "max_new_tokens": job.max_new_tokens}
    row = Engine(target).generate([job.prompt], **how).rows[0]
    return row.tokens, row.finish


def tiny_engine(drafted: bool = True, **how) -> Engine:
    target = tiny_target()
    return Engine(target, *([tiny_drafter(target), DynamicTree(3, 3, 9)] if drafted else []), **how)


def decode(scheduler: Scheduler, *jobs: Heard) -> None:
    """Submit jobs one by one, and wait until they have ended."""
    for heard in jobs:
        scheduler.submit([heard.job])
    if scheduler.thread.ident is None:
        scheduler.start()
    for heard in jobs:
        heard.wait()


@contextmanager
def serving(engine: Engine, started: bool = True, **how):
    """A scheduler that runs; afterwards its thread has ended."""
    scheduler = Scheduler(engine, **({"rows": 4, "room": 40} | how))
    if started:
        scheduler.start()
    try:
        yield scheduler
    finally:
        scheduler.close()
        scheduler.join(300)
        assert not scheduler.thread.is_alive()


def idle(scheduler) -> bool:
    return not scheduler.queue and not scheduler.running


def watch(engine: Engine, note: Callable[[RoundReport], object]) -> None:
    """Let `note` see the report of each step."""
    step = engine.step

    def watched():
        if (report := step()) is not None:
            note(report)
        return report

    engine.step = watched


@cache
def expected(number: int) -> tuple[list[int], str]:
    return alone(tiny_target(), mixed(number).job)


@pytest.mark.parametrize(
    ("drafted", "how", "count"),
    [(True, {}, 60), (True, {"overlap": True}, 60), (False, {}, 30), (True, {"graphs": Tape()}, 12)],
    ids=["speculative", "overlapped", "plain", "recorded"],
)
def test_every_text_is_the_one_it_has_alone(drafted, how, count):
    """Jobs of three threads for 4 rows. Some are given up at their first token, and some at any time."""
    jobs = [mixed(number) for number in range(count)]
    with serving(tiny_engine(drafted, **how), prefill_chunk=30) as scheduler:

        def send(part: int) -> None:
            draw = random.Random(part)
            for number in range(part, len(jobs), 3):
                if gives_up(number):
                    at_first(jobs[number], lambda of=jobs[number]: scheduler.cancel([of.job]))
                scheduler.submit([jobs[number].job])
                if draw.random() < 0.5:
                    time.sleep(0.002)
                if number % 6 == 0:
                    scheduler.cancel([jobs[number].job])

        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(send, range(3))) == [None] * 3
        for job in jobs:
            job.wait()
        assert idle(scheduler)
        assert scheduler.engine.loop.batch.free() == 4
        assert scheduler.engine.waiting == []
    for number, heard in enumerate(jobs):
        tokens, finish = expected(number)
        assert heard.finish == "abort" or not gives_up(number)
        if heard.finish == "abort":
            assert gives_up(number) or number % 6 == 0
            assert heard.tokens == tokens[: len(heard.tokens)]
        else:
            assert (heard.tokens, heard.finish) == (tokens, finish)
        wanted = [len(d.tokens) * (number % 4 == 0) for d in heard.deltas]
        assert [len(d.logprobs or []) for d in heard.deltas] == wanted
    assert {"eos", "length", "abort"} <= {heard.finish for heard in jobs}
    check_books(scheduler, jobs, drafted)


def check_books(scheduler, jobs: list[Heard], drafted: bool) -> None:
    """The counters add up to the jobs' deltas."""
    value = scheduler.metrics.value
    began = [heard for heard in jobs if heard.tokens]
    assert value("vllm:generation_tokens") == sum(len(heard.tokens) for heard in jobs)
    assert value("vllm:prompt_tokens") == sum(len(heard.job.prompt) for heard in began)
    assert value("specdec:round_tokens") == sum(len(heard.tokens) - 1 for heard in began)
    assert value("specdec:sequence_rounds") == sum(len(heard.job.sequence.trace.emitted) for heard in began)
    reasons = {"eos": "stop", "length": "length", "abort": "abort"}
    for finish, reason in reasons.items():
        assert value("vllm:request_success", finished_reason=reason) == sum(h.finish == finish for h in jobs)
    for name, number in (("time_to_first_token", len(began)), ("e2e_request_latency", len(jobs))):
        assert value(f"vllm:{name}_seconds_count") == number
    drafts = value("vllm:spec_decode_num_drafts")
    assert drafts == drafted * value("specdec:sequence_rounds")
    assert value("vllm:spec_decode_num_draft_tokens") == 8 * drafts
    accepted = value("vllm:spec_decode_num_accepted_tokens")
    places = [value("vllm:spec_decode_num_accepted_tokens_per_pos", position=p) for p in range(3)]
    assert sum(places) == accepted
    assert places == sorted(places, reverse=True)
    assert (accepted > 0) == drafted


def test_first_come_first_served_within_the_budget_of_a_prefill():
    """Prefills are of at most 20 tokens, padding counted. Who runs has a round between two, also between the parts of a
    longer prompt, of which all but the last report nobody."""
    engine, steps = tiny_engine(), []
    watch(engine, lambda report: steps.append((report.prefill, [row.prompt for row in report.rows])))
    lengths = [5, 5, 9, 3, 30, 2, 2, 2, 2, 2, 2, 2]
    jobs = [Heard(prompt=[1 + i] * n, max_new_tokens=6, eos=frozenset()) for i, n in enumerate(lengths)]
    with serving(engine, started=False, prefill_chunk=20) as scheduler:
        decode(scheduler, *jobs)
    groups = [prompts for prefill, prompts in steps if prefill and prompts]
    assert sum(prefill and not prompts for prefill, prompts in steps) == 1  # of 30 tokens the first 20
    assert [prompt for group in groups for prompt in group] == [job.job.prompt for job in jobs]
    assert all(len(group) * max(map(len, group)) <= 20 for group in groups if group != [jobs[4].job.prompt])
    assert max(map(len, groups)) > 1
    assert groups[:2] == [[jobs[0].job.prompt, jobs[1].job.prompt], [jobs[2].job.prompt, jobs[3].job.prompt]]
    assert not any(first and second for (first, _), (second, _) in pairwise(steps))
    assert max(len(prompts) for _, prompts in steps) <= 4


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_a_request_of_many_choices_does_not_hold_up_others(rows):
    """A short request gets a row at once, of a single row the next turn. Two long requests take turns."""
    many, more = ([Heard(prompt=[1 + i] * 3, max_new_tokens=30, eos=frozenset()) for i in range(8)] for _ in range(2))
    short, ended = Heard(prompt=[5], max_new_tokens=2, eos=frozenset()), []

    def send_others() -> None:
        scheduler.submit([short.job])
        scheduler.submit([heard.job for heard in more])

    with serving(tiny_engine(False), started=False, rows=rows) as scheduler:
        at_first(many[0], send_others)
        for heard in (*many, *more, short):
            heard.at_end = ended.append
        scheduler.submit([heard.job for heard in many])
        scheduler.start()
        for heard in (*many, *more, short):
            heard.wait()
    assert ended.index(short) == (0 if rows > 1 else 1)
    turns = [heard in more for heard in ended if heard is not short]
    assert sum(turns[: 8 + rows]) >= 4
    assert sum(turns[-rows - 2 :]) < rows + 2


def test_a_policy_gets_the_time_of_rounds_but_not_prefills_and_not_waiting():
    policy, seconds, prefills, busy = Fixed(2), [], [], 0.0
    policy.took = seconds.append
    engine = tiny_engine(adaptive=policy)
    watch(engine, lambda report: prefills.append(report.prefill))
    with serving(engine) as scheduler:
        for wait in (0.0, 1.5):
            time.sleep(wait)
            start = time.perf_counter()
            decode(scheduler, Heard(prompt=[1, 2, 3], max_new_tokens=8, eos=frozenset()))
            busy += time.perf_counter() - start
    assert len(seconds) == prefills.count(False) > 2
    assert 0 < sum(seconds) < busy + 0.5


@pytest.mark.parametrize("how", [{}, {"overlap": True}, {"adaptive": Fixed(0)}], ids=["eager", "overlapped", "held"])
def test_an_idle_engine_keeps_nothing_of_those_that_have_ended(how, caplog):
    """Rows are dropped, and what plain rounds have left to the drafter, without another job that makes them go."""
    with serving(tiny_engine(**how)) as scheduler:
        decode(scheduler, Heard(prompt=[1, 2, 3], max_new_tokens=8, eos=frozenset()))
        batch = scheduler.engine.loop.batch
        for _ in range(3000):
            if scheduler.rests:
                break
            time.sleep(0.01)
        assert batch.sequences == []
        assert batch.controller is None or batch.controller.backlog is None
    assert not caplog.records, "no step has failed"


def test_a_full_queue_takes_all_jobs_of_a_request_or_none():
    with serving(tiny_engine(), started=False, rows=2, queue=1) as scheduler:
        jobs = [Heard(prompt=[1, 2], max_new_tokens=3) for _ in range(5)]
        scheduler.submit([jobs[0].job])
        with pytest.raises(Refusal, match="2 sequences are decoded and 1 may wait"):
            scheduler.submit([job.job for job in jobs[1:4]])
        scheduler.submit([job.job for job in jobs[1:3]])
        with pytest.raises(Refusal):
            scheduler.submit([jobs[4].job])
        scheduler.start()
        for job in jobs[:3]:
            job.wait()
        decode(scheduler, jobs[4])
        assert jobs[3].deltas == []


def test_what_the_target_does_not_take_is_said_where_it_is_asked():
    with serving(tiny_engine()) as scheduler:
        for prompt, message in (([], "empty"), ([1] * 40, "40 tokens"), ([99], "token 99")):
            with pytest.raises(ValueError, match=message):
                scheduler.submit([Heard(prompt=[1]).job, Heard(prompt=prompt).job])
        assert idle(scheduler)


def test_one_that_nobody_wants_any_more_leaves_its_row_to_another():
    target = tiny_target()
    with serving(tiny_engine(), started=False, rows=1) as scheduler:
        first, second, never = (Heard(prompt=[n, 5], max_new_tokens=30, eos=frozenset()) for n in (1, 2, 3))
        at_first(first, lambda: scheduler.cancel([first.job, never.job]))
        scheduler.submit([first.job, second.job, never.job])
        scheduler.start()
        first.wait()
        scheduler.cancel([first.job])  # once more, to no effect
        assert (second.wait().tokens, second.finish) == alone(target, second.job)
        scheduler.cancel([second.job])
    assert [heard.finish for heard in (first, second, never)] == ["abort", "length", "abort"]
    assert (len(first.tokens), never.tokens) == (1, [])
    assert (first.job.sequence.tokens, first.job.sequence.finish) == (first.tokens, "abort")  # not decoded any further


@pytest.mark.parametrize("grace", [300, 0])
def test_what_runs_may_end_within_the_grace_and_what_waits_is_reported_when_the_server_stops(grace):
    with serving(tiny_engine(), started=False, rows=1) as scheduler:
        runs, waits = (Heard(prompt=[n, 5], max_new_tokens=20, eos=frozenset()) for n in (1, 2))
        at_first(runs, lambda: scheduler.close(grace))
        scheduler.submit([runs.job, waits.job])
        scheduler.start()
        assert (waits.wait().finish, waits.deltas[-1].error) == ("error", "the server stops")
        with pytest.raises(Refusal, match="the server stops"):
            scheduler.submit([Heard(prompt=[1]).job])
        tokens, finish = alone(tiny_target(), runs.job)
        assert (runs.wait().tokens, runs.finish) == ((tokens, finish) if grace else (tokens[:1], "error"))
        assert runs.deltas[-1].error == ("" if grace else "the server stops")
        scheduler.join(300)
        assert idle(scheduler)


def test_a_step_that_fails_costs_those_that_run_and_nobody_else():
    engine, fails, target = tiny_engine(), [True], tiny_target()
    step = engine.step

    def failing():
        if len(scheduler.running) == 2 and not scheduler.prefilled and fails:
            fails.clear()
            raise RuntimeError("no memory")
        return step()

    engine.step = failing
    with serving(engine, started=False, rows=2) as scheduler:
        jobs = [Heard(prompt=[n, 3], max_new_tokens=12, eos=frozenset()) for n in range(1, 5)]
        decode(scheduler, *jobs)
        assert [job.finish for job in jobs] == ["error", "error", "length", "length"]
        assert jobs[0].deltas[-1].error == "decoding has failed: no memory"
        for job in jobs[2:]:
            assert job.tokens == alone(target, job.job)[0]


def test_an_engine_that_cannot_begin_anew_ends_everything(monkeypatch):
    engine = tiny_engine()
    with serving(engine, started=False, rows=1) as scheduler:
        jobs = [Heard(prompt=[n, 3]) for n in (1, 2)]
        scheduler.submit([job.job for job in jobs])
        monkeypatch.setattr(engine, "step", lambda: 1 / 0)
        monkeypatch.setattr(engine, "reserve", lambda *_, **__: 1 / 0)
        scheduler.start()
        assert [job.wait().finish for job in jobs] == ["error", "error"]
        scheduler.join(300)
        with pytest.raises(Refusal, match="decoding has failed: division by zero"):
            scheduler.submit([Heard(prompt=[1]).job])
