"""One request for text, from its body to its answer: whole, or as a stream of server-sent events."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from concurrent.futures import Executor
from typing import Any

from specdec.cli.reading import parse_json
from specdec.serve.jobs import Delta
from specdec.serve.protocol import Ask, StreamOptions, read
from specdec.serve.refusal import Refusal
from specdec.serve.scheduler import Scheduler
from specdec.serve.service import Service
from specdec.threads import Made

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]  # of ASGI
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
GAVE_UP = "the grammar of this request has become too complex for the library that reads it"
POLL = 0.2  # seconds
DONE = "data: [DONE]\n\n"


def gone() -> Refusal:
    """The error for a client that disconnected. The status is nginx's."""
    return Refusal("the client went away", status=499)


async def read_body(receive: Receive, most: int) -> Any:
    """The JSON of a body. `Refusal` for one of more than `most` bytes, and for anything else."""
    body, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise gone()
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > most:
            raise Refusal(f"the body has more than {most} bytes", status=413, code="request_too_large")
    try:
        return parse_json(bytes(body), "the body")
    except ValueError as error:
        raise Refusal(str(error)) from None


async def unless_stopped(scheduler: Scheduler, awaited: Awaitable[Made]) -> Made:
    """Return the awaited result. Raises `Refusal` as soon as the server stops."""
    task = asyncio.ensure_future(awaited)
    while not (await asyncio.wait([task], timeout=POLL))[0]:
        if not scheduler.serves():
            task.cancel()
            raise Refusal("the server stops", status=503)
    return task.result()


class Exchange:
    """The jobs of a request while they are decoded. All of it happens on the event loop but `Service.prepare`."""

    def __init__(self, service: Service, kind: type[Ask], body: Any):
        """`Refusal` for a body that is no such request."""
        self.service, self.ask = service, read(kind, body)
        self.inbox: asyncio.Queue[Delta] = asyncio.Queue()

    async def begin(self, receive: Receive, tokenizing: Executor, grammars: Executor) -> None:
        """Queue the jobs. If `receive` reports that the client disconnected, cancel them."""
        call = asyncio.get_running_loop().run_in_executor
        formed = self.ask.response_format or self.ask.structured_outputs
        grammar = await call(grammars, self.service.grammar_of, self.ask) if formed else None
        self.reply = await call(tokenizing, self.service.prepare, self.ask, grammar, self.inbox.put_nowait)
        self.choices = {choice.job: choice for choice in self.reply.choices}
        try:
            self.service.scheduler.submit([*self.choices])
        except Refusal:
            raise
        except ValueError as error:
            raise Refusal(str(error), self.ask.main) from None
        self.watch = asyncio.create_task(self._watch(receive))  # held here, as the event loop does not hold it

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._cancel()

    def _cancel(self) -> None:
        self.service.scheduler.cancel([*self.choices])

    async def whole(self) -> dict:
        """The answer, when all of it is there. `Refusal` if it cannot be had."""
        try:
            async for _ in self._pieces():
                pass
            return self.reply.whole()
        finally:
            self._cancel()
            self.watch.cancel()

    async def events(self) -> AsyncIterator[str]:
        """Yield server-sent events: one a step, or every `Service.stream_interval` tokens. An error is the last one."""
        options = self.ask.stream_options or StreamOptions()
        try:
            async for choice, piece in self._pieces():
                yield _event(self.reply.chunk(choice, piece, options.continuous_usage_stats))
            if options.include_usage:
                yield _event(self.reply.last_chunk())
        except Refusal as refusal:
            yield _event(refusal.body())
        finally:
            self._cancel()
            self.watch.cancel()
        yield DONE

    async def _pieces(self):
        """(choice, piece) as they come, until all choices have ended."""
        left = len(self.choices)
        while left:
            delta = await self.inbox.get()
            choice = self.choices[delta.job]
            if delta.finish == "abort":
                raise gone()
            if delta.finish == "error" and delta.error:
                raise Refusal(delta.error, status=delta.status)
            if delta.finish == "error":
                raise Refusal(GAVE_UP, "response_format" if self.ask.response_format else "structured_outputs")
            left -= delta.finish is not None
            for part in choice.portions(delta, self.service.stream_interval if self.ask.stream else None):
                yield choice, choice.take(part)


def _event(body: dict) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
