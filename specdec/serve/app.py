"""The web application: OpenAI's interface over a `Service`. docs/serve.md lists what clients may send."""

import asyncio
import hmac
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from specdec import __version__
from specdec.serve.exchange import Exchange, read_body
from specdec.serve.jobs import Delta
from specdec.serve.protocol import Ask, ChatAsk, CompletionAsk
from specdec.serve.refusal import Refusal
from specdec.serve.scheduler import Scheduler, hand_out
from specdec.serve.service import Service

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


def make_app(service: Service, api_key: str | None = None) -> FastAPI:
    """The application. It starts the scheduler when it starts, and closes the scheduler when it ends.

    api_key: the bearer token that all paths but /health, /version and /metrics need; None: none."""
    tokenizing = ThreadPoolExecutor(1, "tokenizer")  # one: prompts keep their order

    @asynccontextmanager
    async def life(_):
        async with running(service.scheduler):
            yield
        tokenizing.shutdown()

    app = FastAPI(title="specdec", lifespan=life, docs_url=None, redoc_url=None, openapi_url=None)
    _add_errors(app, service)
    _add_state(app, service)
    _add_answers(app, service, tokenizing, api_key)
    return app


@asynccontextmanager
async def running(scheduler: Scheduler):
    """Run the scheduler, which sends what it decodes to this event loop."""
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


def _add_errors(app: FastAPI, service: Service) -> None:
    """Errors in OpenAI's form."""

    @app.exception_handler(Refusal)
    async def refused(request: Request, refusal: Refusal):
        service.scheduler.metrics.add("specdec:requests_refused", status=refusal.status)
        headers = {"retry-after": "1"} if refusal.status in (429, 503) else None
        return JSONResponse(refusal.body(), refusal.status, headers=headers)

    @app.exception_handler(404)
    @app.exception_handler(405)
    async def not_there(request: Request, error: Exception):
        message = f"{request.method} {request.url.path} is not served here"
        return await refused(request, Refusal(message, status=error.status_code))

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception):
        return await refused(request, Refusal(f"the server has failed: {type(error).__name__}", status=500))


def _add_state(app: FastAPI, service: Service) -> None:
    """Paths that need no key."""

    @app.get("/health")
    async def health():
        return Response(status_code=200 if service.scheduler.serves() else 503)

    @app.get("/version")
    async def version():
        return {"version": __version__}

    @app.get("/metrics")
    async def metrics():
        return Response(service.scheduler.metrics.text(), media_type=PROMETHEUS)


def _add_answers(app: FastAPI, service: Service, tokenizing: ThreadPoolExecutor, api_key: str | None) -> None:
    """Paths of the model."""

    async def check_key(request: Request) -> None:
        sent = request.headers.get("authorization", "").encode()
        if api_key and not hmac.compare_digest(sent, f"Bearer {api_key}".encode()):
            raise Refusal("the API key is missing or wrong", status=401, code="invalid_api_key")

    guards = {"dependencies": [Depends(check_key)]}

    async def body_of(request: Request):
        return await read_body(request.receive, service.limits.body_bytes)

    async def answer(request: Request, kind: type[Ask]):
        exchange = Exchange(service, kind, await body_of(request))
        await exchange.begin(request.receive, tokenizing)
        if exchange.ask.stream:
            return StreamingResponse(exchange.events(), media_type="text/event-stream")
        return JSONResponse(await exchange.whole())

    async def in_thread(request: Request, function):
        body = await body_of(request)
        if not isinstance(body, dict):
            raise Refusal("the body must be a JSON object")
        return await asyncio.get_running_loop().run_in_executor(tokenizing, function, body)

    @app.get("/v1/models", **guards)
    async def models():
        return service.models()

    @app.post("/v1/chat/completions", **guards)
    async def chat(request: Request):
        return await answer(request, ChatAsk)

    @app.post("/v1/completions", **guards)
    async def completions(request: Request):
        return await answer(request, CompletionAsk)

    @app.post("/tokenize", **guards)
    async def tokenize(request: Request):
        return await in_thread(request, service.tokenize)

    @app.post("/detokenize", **guards)
    async def detokenize(request: Request):
        return await in_thread(request, service.detokenize)
