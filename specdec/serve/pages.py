"""What a browser gets: the chat at `/`, and the description of the interface at `/openapi.json` and `/docs`."""

import re
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from specdec.serve.protocol import ChatAsk, CompletionAsk
from specdec.serve.token_asks import DetokenizeAsk, TokenizeAsk

BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatAsk,
    "/v1/completions": CompletionAsk,
    "/tokenize": TokenizeAsk,
    "/detokenize": DetokenizeAsk,
}
OFFLINE = (
    'This page loads Swagger UI from cdn.jsdelivr.net. Without a network read <a href="openapi.json">openapi.json</a>.'
)


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
