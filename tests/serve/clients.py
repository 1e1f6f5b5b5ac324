"""Clients in the tests' own process: a target with a tokenizer behind the application, and what it says alone."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx2

from specdec.engine.engine import Engine
from specdec.serve.app import make_app, running
from specdec.serve.scheduler import Scheduler
from specdec.serve.service import Limits, Service
from specdec.structs import Sampling
from specdec.text import StopStrings, decode_row, encode_chat
from specdec.trees import DynamicTree

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "What is 12 + 30?"}]


@dataclass
class Solo:
    """What a target says alone, plainly."""

    text: str
    ids: list[int]
    finish: str
    logprobs: list[float]


def solo(target, prompt: str | list, tokens: int, *, seed=(0, 0), stop=(), eos=None, **sampling) -> Solo:
    """prompt: a text, or messages."""
    ids = target.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else encode_chat(target, prompt)
    stops = [StopStrings(target.tokenizer, stop)] if stop else None
    how = {"sampling": Sampling(**sampling), "seed": [seed], "stop": stops, "eos": eos, "logprobs": True}
    row = Engine(target).generate([ids], max_new_tokens=tokens, **how).rows[0]
    finish = {"eos": "stop"}.get(row.finish, row.finish)
    return Solo(decode_row(target.tokenizer, row.tokens, stop), row.tokens, finish, row.logprobs)


@dataclass
class Server:
    app: object
    service: Service
    client: httpx2.AsyncClient

    @property
    def scheduler(self) -> Scheduler:
        return self.service.scheduler

    async def post(self, path: str, **body) -> dict:
        answer = await self.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def stream(self, path: str, **body) -> list[dict]:
        """The events of a stream, whose last one is [DONE]."""
        answer = await self.client.post(path, json=body | {"stream": True})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        *events, done, end = answer.text.split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        assert all(event.startswith("data: ") for event in events)
        return [json.loads(event.removeprefix("data: ")) for event in events]

    async def counters(self) -> dict[str, float]:
        """/metrics without the labels that all series have."""
        text = (await self.client.get("/metrics")).text
        lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
        return {name.replace('model_name="tiny",engine="0"', "").replace("{}", ""): float(x) for name, x in lines}


def serve(pair, use: Callable[[Server], Awaitable], *, key=None, limits=None, **how) -> None:
    """Let `use` talk to a server of this target and drafter."""

    async def run() -> None:
        async with server_of(pair, key, limits, **how) as server:
            await use(server)

    asyncio.run(run())


@asynccontextmanager
async def server_of(pair, key, limits, told=None, adaptive=None, prefixes=0, **how):
    target, drafter = pair
    engine = Engine(target, drafter, DynamicTree(3, 3, 9), adaptive=adaptive, prefixes=prefixes)
    scheduler = Scheduler(engine, **({"rows": 4, "room": 100} | how))
    service = Service(target, scheduler, "tiny", limits or Limits(), **told or {})
    scheduler.metrics.model = "tiny"
    app = make_app(service, key)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    client = httpx2.AsyncClient(
        transport=httpx2.ASGITransport(app), base_url="http://test", headers=headers, timeout=60
    )
    async with running(scheduler), client:
        yield Server(app, service, client)
    assert not scheduler.thread.is_alive()
    assert not scheduler.running
    assert not scheduler.queue
