"""Requests and chat templates that are wrong, endless or too large: an error in bounded time, and others are served."""

import asyncio
import json
import random
import time
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest

pytest.importorskip("llguidance")

from clients import CHAT, HELLO, TEXT, served

from specdec.sampling_settings import Sampling
from specdec.serve.protocol import ChatAsk, CompletionAsk, read
from specdec.serve.refusal import Refusal
from specdec.serve.service import DetokenizeAsk, TokenizeAsk

FREE = {"prompt": "The", "max_tokens": 2}
COMMON = {
    **{setting.name: setting.default for setting in fields(Sampling)},
    "model": "tiny", "max_tokens": 3, "temperature": 0.5, "seed": 3, "stop": ["a", "b"], "n": 1, "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False},
    "ignore_eos": False, "return_token_ids": True, "structured_outputs": {"regex": "a+"},
    "response_format": {"type": "json_schema", "json_schema": {"schema": {}}},
    "speculative": {"off": False, "steps": 1, "draft": "x", "tree": "1/1/2", "topk": 1, "num_draft_tokens": 2},
}  # fmt: skip
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
BODIES = {
    ChatAsk: COMMON
    | {"messages": [*HELLO, {"role": "user", "content": PARTS}], "max_completion_tokens": 3}
    | {"logprobs": True, "top_logprobs": 2},
    CompletionAsk: COMMON | {"prompt": ["a", [1, 2]], "logprobs": 2},
    TokenizeAsk: {"model": "tiny", "prompt": "a", "messages": HELLO, "add_special_tokens": False},
    DetokenizeAsk: {"model": "tiny", "tokens": [1, 2]},
}
WRONG = [{}, {"zzz": 1}, [], [[]], [3.5], "", "x", -7, 3.5, True, float("nan"), [{"zzz": 1}]]
AS_A_WHOLE = ("stop", "prompt", "tokens")  # texts or lists: the message shows all of the value


def places(value: Any, *path: str | int) -> Iterator[tuple[str | int, ...]]:
    """All places in a body, but those within a schema, which may be anything."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in items:
        if name != "schema":
            yield from places(part, *path, name)


def changed(value: Any, path: tuple[str | int, ...], wrong: Any) -> Any:
    if not path:
        return wrong
    copy = value.copy()
    copy[path[0]] = changed(value[path[0]], path[1:], wrong)
    return copy


@pytest.mark.parametrize("kind", BODIES)
def test_an_error_names_the_field_that_was_sent(kind):
    body = BODIES[kind]
    read(kind, body)
    assert set(body) == set(kind.model_fields)
    for path in places(body):
        name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
        name = path[0] if path[0] in AS_A_WHOLE else name
        refusals = 0
        for wrong in WRONG:
            try:
                read(kind, changed(body, path, wrong))
                continue
            except Refusal as error:
                refusal, refusals = error, refusals + 1
            assert refusal.status == 400
            assert refusal.param == name or refusal.param.startswith((f"{name}.", f"{name}[")), (path, refusal.param)
            assert name in refusal.message, (path, refusal.message)
        assert refusals, path


def cycle(draw: random.Random) -> dict:
    """Definitions that refer to each other and to themselves."""
    names = [f"d{i}" for i in range(draw.randrange(1, 6))]

    def part() -> dict:
        ref = {"$ref": draw.choice(["#", *(f"#/$defs/{name}" for name in names)])}
        more = {"$ref": f"#/$defs/{draw.choice(names)}"}
        forms = [ref, {"anyOf": [ref, more]}, {"allOf": [ref, more]}, {"type": "array", "items": ref, "minItems": 1}]
        return draw.choice([*forms, {"properties": {"a": ref, "b": more}, "required": ["a"]}])

    return {"$defs": {name: part() for name in names}} | part()


def optional(draw: random.Random) -> dict:
    """Hundreds of optional properties, at any depth."""
    kinds = [{}, {"type": "integer"}, {"type": "string", "pattern": "^a{1,50}$"}, {"$ref": "#"}]
    made = {"type": "object", "properties": {f"p{i}": draw.choice(kinds) for i in range(draw.randrange(300, 700))}}
    for _ in range(draw.randrange(3)):
        made = {"type": "object", "properties": {"a": made}, "required": ["a"]}
    return made


def pattern(draw: random.Random) -> dict:
    made = draw.choice(["a", ".", "[^a]", r"\p{L}", "(a|b)*a"])
    for _ in range(draw.choice([2, 5, 12, 400])):
        made = draw.choice(["({}){{1,90}}", "({}|b)*", "({}){{50}}", "(.*{}.*)", "({})"]).format(made)
        made = made if len(made) < 20000 else "a"
    return {"type": "string", "pattern": made}


def values(draw: random.Random) -> dict:
    """Long lists of values, and ranges and multiples that only large automata know."""
    large = [10 ** draw.randrange(1, 19) + draw.randrange(99) for _ in range(3)]
    return draw.choice(
        [
            {"enum": [f"{draw.randrange(10**6)}" for _ in range(draw.randrange(1000, 2500))]},
            {"type": "integer", "minimum": -large[0], "maximum": large[1]},
            {"allOf": [{"multipleOf": x} for x in large]},
            {"type": "array", "minItems": large[0], "maxItems": large[1] * 2},
            {"type": "string", "minLength": large[0]},
        ]
    )


def nested(draw: random.Random) -> str:
    """Too deep for `json.dumps`."""
    depth, inner = draw.choice([50, 200, 1500]), '{"type": "integer"}'
    before, after = draw.choice(
        [('{"type": "array", "items": ', "}"), ('{"anyOf": [', "]}"), ('{"properties": {"a": ', "}}"), ("[", "]")]
    )
    return before * depth + inner + after * depth


async def answer_of(server, schema: dict | str) -> tuple[int, float]:
    """Send a schema; return the status and the seconds it took."""
    text = schema if isinstance(schema, str) else json.dumps(schema)
    form = f'{{"type": "json_schema", "json_schema": {{"name": "x", "schema": {text}}}}}'
    body = f'{{"prompt": "The", "max_tokens": 30, "response_format": {form}}}'
    start = time.monotonic()
    answer = await server.client.post(TEXT, content=body.encode())
    if answer.status_code == 400:
        assert answer.json()["error"]["type"] == "invalid_request_error"
    return answer.status_code, time.monotonic() - start


@pytest.mark.parametrize("make", [cycle, optional, pattern, values, nested])
@served()
async def test_schemas_of_any_kind_are_answered(server, make):
    draw = random.Random(make.__name__)
    for _ in range(8):
        schema = make(draw)
        (status, seconds), _ = await asyncio.gather(answer_of(server, schema), server.post(TEXT, **FREE))
        assert status in (200, 400), schema
        assert seconds < 12, schema  # 4 to compile


@served()
async def test_what_is_no_form_of_any_text_is_refused(server):
    """Also where the library finds out while it decodes, and where it would compile for minutes; others do not wait."""
    many = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(500)}}
    mutual = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    for schema in ({"$ref": "#"}, mutual, many):
        assert (await answer_of(server, schema))[0] == 400
    slow = [asyncio.create_task(answer_of(server, {"multipleOf": 99400891 + i})) for i in range(3)]
    await asyncio.sleep(0.1)
    await server.post(TEXT, **FREE)
    await server.post("/tokenize", prompt="a")
    assert not any(task.done() for task in slow)
    assert [(await task)[0] for task in slow] == [400] * 3


def endless(draw: random.Random) -> str:
    """A template that does not end."""
    body = draw.choice(["", "{{ i }}", "{{ 'a' | int }}", "{{ [3, 1] | sort | join }}", "{% set a = [i] %}"])
    if draw.random() < 0.3:
        macro = "{% macro m(n) %}" + body + "{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
        return "{% set i = 1 %}" + macro + "{{ m(90) }}"
    for _ in range(4):
        body = "{% for i in range(90000) %}" + body + "{% endfor %}"
    return body


@served()
async def test_endless_templates_end(server, monkeypatch):
    monkeypatch.setattr("specdec.text.TEMPLATE_SECONDS", 0.3)
    draw = random.Random(0)
    for _ in range(6):
        monkeypatch.setattr(server.target.tokenizer, "chat_template", endless(draw))
        ask = {"path": CHAT, "json": {"messages": HELLO}}
        wrong = [server.refused(400, "template takes more than 0.3 s", "messages", **ask) for _ in range(3)]
        await asyncio.gather(*wrong, server.post(TEXT, **FREE))


@served()
async def test_a_server_that_stops_waits_for_no_template(server, monkeypatch):
    monkeypatch.setattr("specdec.text.TEMPLATE_SECONDS", 5)
    monkeypatch.setattr(server.target.tokenizer, "chat_template", endless(random.Random(1)))
    start = time.monotonic()
    ask = {"path": CHAT, "json": {"messages": HELLO}}
    waiting = [asyncio.create_task(server.refused(503, "the server stops", **ask)) for _ in range(9)]
    await asyncio.sleep(0.1)
    server.scheduler.close()
    await asyncio.gather(*waiting)
    assert time.monotonic() - start < 4
