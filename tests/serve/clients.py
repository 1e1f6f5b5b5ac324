"""Clients in the tests' own process, for the application with a target and a tokenizer, and the target's own texts."""

import asyncio
import inspect
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx2")

import httpx2
import torch
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from specdec import Engine, Sampling
from specdec.model.target import Target
from specdec.serve.app import make_app, running
from specdec.serve.scheduler import Scheduler
from specdec.serve.service import Service
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


def content(events: list[dict]) -> str:
    """The text of a stream's first choice."""
    choices = [event["choices"][0] for event in events if event["choices"]]
    return "".join(choice["delta"]["content"] if "delta" in choice else choice["text"] for choice in choices)


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

    @property
    def target(self) -> Target:
        return self.service.target

    async def post(self, path: str, **body) -> dict:
        answer = await self.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def refused(self, status: int, message: str, param=None, code=None, path=TEXT, **how) -> None:
        """A request that gets an error in OpenAI's form, whose message contains this regular expression."""
        answer = await self.client.request(how.pop("method", "POST"), path, **how)
        assert answer.status_code == status, (path, how, answer.text)
        error = answer.json()["error"]
        assert re.search(message, error["message"]), error
        assert "\n" not in error["message"]
        kinds = {404: "not_found_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}
        assert (error["param"], error["type"]) == (param, kinds.get(status, "invalid_request_error"))
        assert code is None or error["code"] == code

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
        """/metrics by name and the value of the label that not all series have."""
        counted = {}
        for family in text_string_to_metric_families((await self.client.get("/metrics")).text):
            for series in family.samples:
                labels = dict(series.labels)
                assert (labels.pop("model_name"), labels.pop("engine")) == ("tiny", "0")
                counted[" ".join([series.name, *labels.values()])] = series.value
        return counted


def serve(pair, use: Callable[[Server], Awaitable], **how) -> None:
    """Let `use` talk to a server of this target and drafter, with a fixed number of threads: MKL rounds by it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
        asyncio.run(served_to(pair, use, **how))


def served(**how) -> Callable[[Callable[..., Awaitable]], Callable]:
    """Make a test of a coroutine that talks to a server of the fixture `pair`."""

    def decorate(use):
        def test(pair, **fixtures):
            serve(pair, lambda server: use(server, **fixtures), **how)

        names = ["pair", *list(inspect.signature(use).parameters)[1:]]
        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        test.__signature__ = inspect.Signature(parameters)
        test.__doc__ = use.__doc__
        return test

    return decorate


async def served_to(pair, use, *, key=None, reporting=None, adaptive=None, prefixes=0, callers=(), **how) -> None:
    target, drafter = pair
    engine = Engine(target, drafter, DynamicTree(3, 3, 9), adaptive=adaptive, prefixes=prefixes)
    scheduler = Scheduler(engine, model="tiny", **({"rows": 4, "room": 100} | how))
    service = Service(target, scheduler, "tiny", **reporting or {})
    app = make_app(service, key, *callers)
    headers = {"authorization": f"Bearer {key}".encode()} if key else {}
    client = httpx2.AsyncClient(
        transport=httpx2.ASGITransport(app), base_url="http://test", headers=headers, timeout=60
    )
    async with running(scheduler), client:
        await use(Server(app, service, client))
    assert [scheduler.thread.is_alive(), *scheduler.running, *scheduler.queue] == [False]


@asynccontextmanager
async def listening(app, **how) -> AsyncIterator[int]:
    """The port at which uvicorn serves an application meanwhile."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", **how))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await task
