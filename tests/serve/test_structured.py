"""Structured output over HTTP: `response_format` as OpenAI's clients send it, `structured_outputs` as vLLM's do."""

import asyncio
import json
import re

import pytest

pytest.importorskip("llguidance")

from clients import CHAT, TEXT, content, served, solo

from specdec.sampling.json_grammar import TextMatcher

ASKED = {"messages": [{"role": "user", "content": "Yes?"}], "max_tokens": 60, "temperature": 0.9}
FORM, OUTPUTS = "response_format", "structured_outputs"
SCHEMA = f"{FORM}.json_schema.schema"
CHOICE = {
    "type": "object", "properties": {"ok": {"type": "boolean"}, "why": {"enum": ["a", "b"]}},
    "required": ["ok", "why"], "additionalProperties": False,
}  # fmt: skip


def schema(of) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": of, "strict": True}}


@served()
async def test_answers_are_of_their_form_and_those_beside_them_are_free(server):
    free = {**ASKED, "seed": 7}
    bodies = [
        (CHAT, ASKED | {"seed": 1, "response_format": schema(CHOICE)}),
        (CHAT, free),
        (TEXT, {"prompt": "A", "max_tokens": 20, "seed": 2, "structured_outputs": {"regex": "(no|yes)[0-9]{2}"}}),
        (CHAT, ASKED | {"seed": 3, "response_format": schema({"enum": [1, "two"]}), "n": 2}),
        (CHAT, ASKED | {"seed": 4, OUTPUTS: {"json": {"const": [True]}}, FORM: {"type": "text"}}),
        (CHAT, free | {"response_format": {"type": "text"}}),
    ]
    answers = await asyncio.gather(*(server.post(path, **body) for path, body in bodies))
    said = [[c["message"]["content"] if "message" in c else c["text"] for c in a["choices"]] for a in answers]
    ends = [[c["finish_reason"] for c in a["choices"]] for a in answers]
    parsed = json.loads(said[0][0])
    assert list(parsed) == ["ok", "why"]
    assert type(parsed["ok"]) is bool
    assert parsed["why"] in ("a", "b")
    assert re.fullmatch("(no|yes)[0-9]{2}", said[2][0])
    assert all(json.loads(text) in (1, "two") for text in said[3])
    assert json.loads(said[4][0]) == [True]
    assert [ends[i] for i in (0, 2, 3, 4)] == [["stop"], ["stop"], ["stop", "stop"], ["stop"]]
    expected = solo(server.target, ASKED["messages"], 60, seed=(7, 0), temperature=0.9)
    assert said[1] == said[5] == [expected.text]
    again = await server.stream(CHAT, **bodies[0][1], stream_options={"include_usage": True})
    assert content(again) == said[0][0]
    assert again[-1]["usage"] == answers[0]["usage"]


WRONG = [
    ({FORM: schema({"type": "objekt"})}, SCHEMA, "objekt"),
    ({FORM: schema({"properties": {"a": {"frob": 1}}})}, SCHEMA, "'frob'"),
    ({FORM: schema({"const": "x" * 40000})}, SCHEMA, "may have"),
    ({FORM: {"type": "json_schema"}}, FORM, "with a schema"),
    ({FORM: {"type": "json_object"}, "ignore_eos": True}, "ignore_eos", "contradicts response_format"),
    ({OUTPUTS: {"regex": "["}}, f"{OUTPUTS}.regex", "not taken"),
    ({OUTPUTS: {}}, OUTPUTS, "one of"),
    ({OUTPUTS: {"json": {}}, FORM: {"type": "json_object"}}, OUTPUTS, "contradicts response_format"),
]


@served()
async def test_a_wrong_form_is_reported(server):
    for asked, field, message in WRONG:
        await server.refused(400, message, field, path=CHAT, json=ASKED | asked)


@served()
async def test_a_grammar_that_gives_up_ends_its_request_only(server, monkeypatch):
    monkeypatch.setattr(TextMatcher, "allowed", lambda self: None)
    monkeypatch.setattr(TextMatcher, "take", lambda self, token: False)
    given_up = ASKED | {OUTPUTS: {"json": {"const": "given up"}}}
    refused = server.refused(400, "too complex", OUTPUTS, path=CHAT, json=given_up)
    free, _ = await asyncio.gather(server.post(CHAT, **ASKED, seed=7), refused)
    expected = solo(server.target, ASKED["messages"], 60, seed=(7, 0), temperature=0.9)
    assert free["choices"][0]["message"]["content"] == expected.text
