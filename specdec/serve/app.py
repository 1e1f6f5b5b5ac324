"""The web application: OpenAI's interface over a `Service`, and what a browser gets. docs/serve.md lists it."""

import asyncio
import errno
import hmac
import math
import re
import secrets
import sys
import time
from base64 import b64encode
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from hashlib import sha256
from importlib.resources import files
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from fastapi.security import HTTPBearer
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from specdec import __version__
from specdec.schema import shown
from specdec.serve.exchange import Exchange, Receive, Send, read_body, unless_stopped
from specdec.serve.jobs import Delta
from specdec.serve.metrics import Metrics
from specdec.serve.protocol import Ask, ChatAsk, CompletionAsk
from specdec.serve.refusal import Refusal
from specdec.serve.scheduler import Scheduler, hand_out
from specdec.serve.service import DetokenizeAsk, Service, TokenizeAsk

TOKENIZERS, GRAMMARS = 4, 2  # threads: a long prompt, or a schema that takes long, does not hold up the others
FOREIGN = "a request from the {} {!r} is refused; {} allows it"
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatAsk,
    "/v1/completions": CompletionAsk,
    "/tokenize": TokenizeAsk,
    "/detokenize": DetokenizeAsk,
}
OFFLINE = (
    'This page loads Swagger UI from cdn.jsdelivr.net. Without a network read <a href="openapi.json">openapi.json</a>.'
)


def make_app(
    service: Service, api_key: str | None = None, hosts: Sequence[str] = ("*",), origins: Sequence[str] = ()
) -> FastAPI:
    """Return the application. It starts the scheduler when it starts, and closes the scheduler when it ends.

    api_key: the bearer token that the paths of the model need: /v1 and the tokenizer. hosts: names in the `Host` header
    that are answered. origins: other web pages that may call it. Of these two '*' is any.
    """
    pages: dict[str, Any] = {"docs_url": None, "redoc_url": None, "openapi_url": None}
    app = FastAPI(title="specdec", version=__version__, lifespan=lambda _: running(service.scheduler), **pages)
    _add_errors(app, service)
    app.add_middleware(Callers, hosts=hosts, origins=origins, metrics=service.scheduler.metrics)
    if any(origins):
        app.add_middleware(CORSMiddleware, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"])
    _add_state(app, service)
    _add_answers(app, service, api_key)
    add_pages(app)
    return app


@asynccontextmanager
async def running(scheduler: Scheduler):
    """Run the scheduler, which sends what it decodes to this event loop."""
    loop = asyncio.get_running_loop()

    def deliver(deltas: list[Delta]) -> None:
        with suppress(RuntimeError):  # the loop is closed, so no client listens
            loop.call_soon_threadsafe(hand_out, deltas)

    loop.set_exception_handler(_Failures())
    scheduler.deliver = deliver
    scheduler.start()
    try:
        yield
    finally:
        scheduler.close()
        await loop.run_in_executor(None, scheduler.join)


class _Failures:
    """The event loop's exception handler, which prints at most one line a minute.

    Without it asyncio reports every connection that it cannot accept for lack of a file descriptor, thousands of them.
    """

    def __init__(self) -> None:
        self.said = -math.inf

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict) -> None:
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)):
            loop.default_exception_handler(context)
        elif time.monotonic() > self.said + 60:
            self.said = time.monotonic()
            print("warning: no file descriptor is free, so new connections wait: raise `ulimit -n`", file=sys.stderr)


def _add_errors(app: FastAPI, service: Service) -> None:
    """Errors in OpenAI's form."""

    @app.exception_handler(Refusal)
    async def refused(request: Request, refusal: Refusal):
        return respond(refusal, service.scheduler.metrics)

    @app.exception_handler(404)
    @app.exception_handler(405)
    async def not_there(request: Request, error: Exception):
        message = f"{request.method} {request.url.path} is not served here"
        response = await refused(request, Refusal(message, status=getattr(error, "status_code", 404)))
        response.headers.update(getattr(error, "headers", None) or {})  # `Allow`, of a 405
        return response

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception):
        return await refused(request, Refusal(f"the server has failed: {type(error).__name__}", status=500))


def respond(refusal: Refusal, metrics: Metrics) -> Response:
    """Count a refused request, and return its response."""
    metrics.of("specdec:requests_refused", status=refusal.status).inc()
    headers = {"retry-after": "1"} if refusal.status in (429, 503) else None
    return JSONResponse(refusal.body(), refusal.status, headers=headers)


class Callers:
    """Refuses foreign names of this host and foreign web pages, and returns each request's `X-Request-Id`.

    It is plain ASGI: `app.middleware` would hand every chunk of a stream on through a queue.
    """

    def __init__(
        self, app: Callable[..., Awaitable[None]], hosts: Sequence[str], origins: Sequence[str], metrics: Metrics
    ):
        """hosts, origins: as for `make_app`. metrics: counts the refused requests."""
        self.app, self.hosts, self.origins, self.metrics = app, hosts, origins, metrics

    async def __call__(self, scope: dict, receive: Receive, send: Send) -> None:
        """Answer a request, or have the application answer it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope)
        number = request.headers.get("x-request-id") or secrets.token_hex(16)

        async def numbered(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", number.encode("latin-1"))]
            await send(message)

        refusal = self.refused(request)
        await (respond(refusal, self.metrics) if refusal else self.app)(scope, receive, numbered)

    def refused(self, request: Request) -> Refusal | None:
        """Return why a request is not for the application."""
        host = request.url.hostname or ""
        origin = request.headers.get("origin")
        own = origin in (f"http://{request.headers.get('host')}", f"https://{request.headers.get('host')}")
        if "*" not in self.hosts and host not in self.hosts:
            return Refusal(FOREIGN.format("host", host, "--allowed-hosts"), status=403)
        if origin is not None and not own and not {"*", origin} & set(self.origins):
            return Refusal(FOREIGN.format("web page", origin, "--cors-origins"), status=403)
        if request.headers.get("content-type", "").lower().startswith("text/plain"):
            return Refusal("the body must be application/json, not text/plain", status=415)
        if (encoding := request.headers.get("content-encoding", "identity").lower()) != "identity":
            return Refusal(f"bodies in the encoding {shown(encoding)} are not read: send plain JSON", status=415)
        return None


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


def _add_answers(app: FastAPI, service: Service, api_key: str | None) -> None:
    """Paths of the model."""

    async def check_key(request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        sent = given.strip().encode("latin-1")  # as it came: HTTP knows no encoding of headers
        if api_key and not (scheme.lower() == "bearer" and hmac.compare_digest(sent, api_key.encode())):
            raise Refusal("the API key is missing or wrong", status=401, code="invalid_api_key")

    tokenizing, grammars = ThreadPoolExecutor(TOKENIZERS), ThreadPoolExecutor(GRAMMARS)
    describes = HTTPBearer(auto_error=False)  # names the key in /openapi.json; it checks nothing
    guards: dict[str, Any] = {"dependencies": [Depends(describes), Depends(check_key)]}

    async def body_of(request: Request):
        return await unless_stopped(service.scheduler, read_body(request.receive, service.body_bytes))

    async def answer(request: Request, kind: type[Ask]):
        exchange = Exchange(service, kind, await body_of(request))
        await unless_stopped(service.scheduler, exchange.begin(request.receive, tokenizing, grammars))
        if exchange.ask.stream:
            return StreamingResponse(exchange.events(), media_type="text/event-stream")
        return JSONResponse(await exchange.whole())

    async def in_thread(request: Request, function):
        body = await body_of(request)
        if not isinstance(body, dict):
            raise Refusal("the body must be a JSON object")
        call = asyncio.get_running_loop().run_in_executor(tokenizing, function, body)
        return await unless_stopped(service.scheduler, call)

    @app.get("/v1/models/", include_in_schema=False, **guards)
    @app.get("/v1/models", **guards)
    async def models():
        return service.models()

    @app.get("/v1/models/{name:path}", **guards)
    async def model(name: str):
        service.check_model(name)
        return service.models()["data"][0]

    @app.post("/v1/chat/completions", **guards)
    async def chat(request: Request):
        return await answer(request, ChatAsk)

    @app.post("/v1/completions", **guards)
    async def completions(request: Request):
        return await answer(request, CompletionAsk)

    @app.post("/tokenize", **guards)
    async def tokenized(request: Request):
        return await in_thread(request, service.tokenize)

    @app.post("/detokenize", **guards)
    async def detokenized(request: Request):
        return await in_thread(request, service.detokenize)


def add_pages(app: FastAPI) -> None:
    """Serve the pages. None of them needs the API key: they hold nothing of the model."""
    page = files("specdec.serve").joinpath("page.html").read_text(encoding="utf-8")
    headers = {"content-security-policy": policy_of(page), "cache-control": "no-cache"}
    swagger = get_swagger_ui_html(openapi_url="openapi.json", title="specdec: HTTP API", swagger_favicon_url="data:,")
    box = '<div id="swagger-ui">'
    reference = bytes(swagger.body).decode().replace(box, box + OFFLINE)  # which Swagger UI replaces

    @app.get("/", include_in_schema=False)
    async def chat_page() -> HTMLResponse:
        return HTMLResponse(page, headers=headers)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(reference)

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> dict:
        return describe(app)


def policy_of(page: str) -> str:
    """Return the Content-Security-Policy of a page that runs its own script and styles, and calls its own server."""
    hashes = {
        tag: " ".join(
            f"'sha256-{b64encode(sha256(part.encode()).digest()).decode()}'"
            for part in re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        )
        for tag in ("script", "style")
    }
    own = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; img-src data:"
    return f"{own}; connect-src 'self'; script-src {hashes['script']}; style-src {hashes['style']}"


def describe(app: FastAPI) -> dict:
    """Return the OpenAPI document, with the bodies that the paths read themselves."""
    if app.openapi_schema is None:
        made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        place = "#/components/schemas/{model}"
        refs, schemas = models_json_schema([(kind, "validation") for kind in BODIES.values()], ref_template=place)
        made.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
        for path, kind in BODIES.items():
            content = {"application/json": {"schema": refs[kind, "validation"]}}
            made["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
        app.openapi_schema = made
    return app.openapi_schema
