"""What tests of the server share: jobs that are listened to, and the text that each has alone."""

import random
import threading
from collections.abc import Callable
from contextlib import contextmanager

from helpers import tiny_drafter, tiny_target

from specdec.engine.engine import Engine
from specdec.serve.jobs import Delta, Job
from specdec.serve.scheduler import Scheduler
from specdec.structs import Sampling
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
        Sampling(),
        Sampling(0.8),
        Sampling(1.0, top_k=5),
        Sampling(1.2, top_p=0.9, repetition_penalty=1.3),
        Sampling(frequency_penalty=0.7),
    )
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
