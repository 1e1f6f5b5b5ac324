"""A crowd of requests to a server in this process, over real connections, and all that went wrong."""

import asyncio
import socket
import time
from collections.abc import Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass

from specdec.engine.engine import Engine
from specdec.lab.load.books import Ledger, Left, settled, wrong_books
from specdec.lab.load.crowd import TEXT, Alone, Case, Heard, Sizes, Text, draw, send
from specdec.lab.load.crowd import fault as fault_of
from specdec.serve.app import make_app
from specdec.serve.scheduler import Scheduler
from specdec.serve.service import Limits, Service

WARM_UP = 10**6  # the number of the first request of the warm-up


@dataclass
class Crowd:
    """Requests, and what each must get: whoever tries several servers decodes that once."""

    cases: list[Case]
    must: list[list[Text]]
    prompts: list[int]  # tokens

    @classmethod
    def draw(cls, alone: Alone, count: int, prompts: Sequence[str], sizes: Sizes, warm_up: int, told=lambda: None):
        """`count` cases between two that are the same, behind `warm_up` others."""
        numbers = [*range(WARM_UP, WARM_UP + warm_up), *range(count)]
        cases = [draw(number, prompts, sizes) for number in numbers]
        probe = {"prompt": prompts[0][:40], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        probes = [Case(WARM_UP + warm_up + i, "whole", TEXT, probe | {"seed": WARM_UP + warm_up + i}) for i in (0, 1)]
        cases = [*cases[:warm_up], probes[0], *cases[warm_up:], probes[1]]
        made: tuple[list, list] = ([], [])
        for case in cases:
            made[0].append(alone(case))
            made[1].append(0 if case.way == "wrong" else len(alone.prompt(case)))
            told()
        return cls(cases, *made)


async def run(engine: Engine, crowd: Crowd, sizes: Sizes, *, at_once: int, warm_up: int, **how) -> dict:
    """Figures of a server that this crowd asks, `at_once` at a time, and under 'wrong' all that is wrong. how: as for
    `Scheduler`, beside room and observer."""
    ledger, start = Ledger(), time.perf_counter()
    scheduler = Scheduler(engine, room=sizes.room, observer=ledger, **how)
    service = Service(engine.target, scheduler, "crowd", Limits(sizes.body))
    async with listening(service) as client:

        async def ask(cases: Sequence[Case]) -> list[Heard]:
            slots = asyncio.Semaphore(at_once)

            async def one(case: Case) -> Heard:
                async with slots:
                    return await send(client, case)

            heard = await asyncio.gather(*map(one, cases))
            if not await settled(scheduler):
                raise ValueError("something runs on, a minute after the last answer")
            return heard

        first = warm_up + 1
        heard = await ask(crowd.cases[:warm_up]) + await ask(crowd.cases[warm_up:first])
        before = Left.of(scheduler)
        heard += await ask(crowd.cases[first:-1]) + await ask(crowd.cases[-1:])
        after = Left.of(scheduler)
    wrong = [f"case {case.number}, {case.way}: {found}" for case, one, must, prompt
             in zip(crowd.cases, heard, crowd.must, crowd.prompts, strict=True)
             if (found := fault_of(case, one, must, prompt))]  # fmt: skip
    wrong += wrong_books(scheduler.metrics, ledger, crowd.cases, heard, crowd.must)
    if before != after:
        wrong.append(f"left behind: {before} became {after}")
    return figures(crowd, heard, scheduler) | {
        "seconds": round(time.perf_counter() - start, 1),
        "before": asdict(before),
        "after": asdict(after),
        "wrong": wrong,
    }


def figures(crowd: Crowd, heard: Sequence[Heard], scheduler: Scheduler) -> dict:
    """Of all requests, the warm-up's among them."""
    value, ways = scheduler.metrics.value, [case.way for case in crowd.cases]
    right = [case.way != "wrong" and one.whole for case, one in zip(crowd.cases, heard, strict=True)]
    return {
        "requests": len(heard),
        "answered": sum(right),
        "refused": ways.count("wrong"),
        "went_away": len(heard) - sum(right) - ways.count("wrong"),
        "texts": sum(len(one.choices) for one, whole in zip(heard, right, strict=True) if whole),
        "tokens": int(value("vllm:generation_tokens")),
        "tau": round(value("specdec:round_tokens") / max(value("specdec:sequence_rounds"), 1), 3),
        "rows_aborted": int(value("vllm:request_success", finished_reason="abort")),
    }


@asynccontextmanager
async def listening(service: Service):
    """A client of a server that listens at a free port, on this event loop."""
    import httpx2  # extras
    import uvicorn

    app = make_app(service)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=60)
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
            if task.done():
                task.result()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with httpx2.AsyncClient(base_url=url, timeout=600, limits=httpx2.Limits(max_connections=None)) as client:
            yield client
        server.should_exit = True
        await task
