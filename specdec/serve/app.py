"""The web application: OpenAI's interface over a `Service`. docs/serve.md says what clients may send.

FastAPI is an extra, and is imported where the application is made.
"""

import asyncio
import hmac
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress

from specdec import __version__
from specdec.serve.exchange import Exchange, read_body
from specdec.serve.jobs import Delta
from specdec.serve.protocol import Ask, ChatAsk, CompletionAsk, Refusal
from specdec.serve.scheduler import Scheduler, hand_out
from specdec.serve.service import Service

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


def make_app(service: Service, api_key: str | None = None):
    """The FastAPI application. It starts the scheduler when it starts, and closes it when it ends.

    api_key: what clients must send as bearer token to all but /health, /version and /metrics; None: nothing."""
    from fastapi import Depends, FastAPI, Request

    tokenizing = ThreadPoolExecutor(1, "tokenizer")  # one: prompts keep their order

    @asynccontextmanager
    async def life(_):
        async with running(service.scheduler):
            yield
        tokenizing.shutdown()

    async def check_key(request: Request) -> None:
        sent = request.headers.get("authorization", "").encode()
        if api_key and not hmac.compare_digest(sent, f"Bearer {api_key}".encode()):
            raise Refusal("the API key is missing or wrong", status=401, code="invalid_api_key")

    app = FastAPI(title="specdec", lifespan=life, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.tokenizing = tokenizing
    _refuse(app, service)
    _tell_state(app, service)
    _answer(app, service, [Depends(check_key)])
    return app


@asynccontextmanager
async def running(scheduler: Scheduler):
    """The scheduler at work; its jobs are told on this event loop."""
    loop = asyncio.get_running_loop()

    def deliver(deltas: list[Delta]) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody listens any more
            loop.call_soon_threadsafe(hand_out, deltas)

    scheduler.deliver = deliver
    scheduler.start()
    try:
        yield
    finally:
        scheduler.close()
        await loop.run_in_executor(None, scheduler.join)


def _refuse(app, service: Service) -> None:
    """Errors in OpenAI's form."""
    from fastapi import Request
    from fastapi.responses import JSONResponse

    def refused(refusal: Refusal) -> JSONResponse:
        service.scheduler.metrics.add("specdec:requests_refused", status=refusal.status)
        headers = {"retry-after": "1"} if refusal.status in (429, 503) else None
        return JSONResponse(refusal.body(), refusal.status, headers=headers)

    @app.exception_handler(Refusal)
    async def of_ours(request: Request, error: Refusal):
        return refused(error)

    @app.exception_handler(404)
    @app.exception_handler(405)
    async def not_there(request: Request, error: Exception):
        message = f"{request.method} {request.url.path} is not served here"
        return refused(Refusal(message, status=error.status_code))

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception):
        return refused(Refusal(f"the server has failed: {type(error).__name__}", status=500))


def _tell_state(app, service: Service) -> None:
    """What needs no key."""
    from fastapi.responses import Response

    @app.get("/health")
    async def health():
        return Response(status_code=200 if service.scheduler.serves() else 503)

    @app.get("/version")
    async def version():
        return {"version": __version__}

    @app.get("/metrics")
    async def metrics():
        return Response(service.scheduler.metrics.text(), media_type=PROMETHEUS)


def _answer(app, service: Service, guards: list) -> None:
    """What a model is asked for."""
    from fastapi import Request
    from fastapi.responses import JSONResponse, StreamingResponse

    async def body_of(request: Request):
        return await read_body(request.receive, service.limits.body_bytes)

    async def answer(request: Request, kind: type[Ask]):
        exchange = Exchange(service, kind, await body_of(request))
        await exchange.begin(request.receive, app.state.tokenizing)
        if exchange.ask.stream:
            return StreamingResponse(exchange.events(), media_type="text/event-stream")
        return JSONResponse(await exchange.whole())

    @app.get("/v1/models", dependencies=guards)
    async def models():
        return service.models()

    @app.post("/v1/chat/completions", dependencies=guards)
    async def chat(request: Request):
        return await answer(request, ChatAsk)

    @app.post("/v1/completions", dependencies=guards)
    async def completions(request: Request):
        return await answer(request, CompletionAsk)

    @app.post("/tokenize", dependencies=guards)
    async def tokenize(request: Request):
        return await in_thread(service.tokenize, await body_of(request))

    @app.post("/detokenize", dependencies=guards)
    async def detokenize(request: Request):
        return await in_thread(service.detokenize, await body_of(request))

    async def in_thread(function, body):
        if not isinstance(body, dict):
            raise Refusal("the body must be a JSON object")
        return await asyncio.get_running_loop().run_in_executor(app.state.tokenizing, function, body)
