"""Structured output over HTTP: `response_format` as OpenAI's clients send it, `structured_outputs` as vLLM's do."""

import asyncio
import json
import re

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx2")
pytest.importorskip("llguidance")

from clients import CHAT, TEXT, serve, solo

from specdec.drafters.formats import load_drafter
from specdec.model.loader import load_target
from specdec.sampling.json_grammar import TextMatcher

ASKED = {"messages": [{"role": "user", "content": "Yes?"}], "max_tokens": 60, "temperature": 0.9}
CHOICE = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "why": {"enum": ["a", "b"]}},
    "required": ["ok", "why"],
    "additionalProperties": False,
}


def schema(of, **more) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": of, "strict": True} | more}


def test_answers_are_of_their_form_and_those_beside_them_are_free(pair):
    async def use(server):
        free = {**ASKED, "seed": 7}
        bodies = [
            (CHAT, ASKED | {"seed": 1, "response_format": schema(CHOICE)}),
            (CHAT, free),
            (TEXT, {"prompt": "A", "max_tokens": 20, "seed": 2, "structured_outputs": {"regex": "(no|yes)[0-9]{2}"}}),
            (CHAT, ASKED | {"seed": 3, "response_format": schema({"enum": [1, "two"]}), "n": 2}),
            (
                CHAT,
                ASKED
                | {"seed": 4, "structured_outputs": {"json": {"const": [True]}}, "response_format": {"type": "text"}},
            ),
            (CHAT, free | {"response_format": {"type": "text"}}),
        ]
        answers = await asyncio.gather(*(server.post(path, **body) for path, body in bodies))
        said = [[c["message"]["content"] if "message" in c else c["text"] for c in a["choices"]] for a in answers]
        ends = [[c["finish_reason"] for c in a["choices"]] for a in answers]
        told = json.loads(said[0][0])
        assert list(told) == ["ok", "why"]
        assert type(told["ok"]) is bool
        assert told["why"] in ("a", "b")
        assert re.fullmatch("(no|yes)[0-9]{2}", said[2][0])
        assert all(json.loads(text) in (1, "two") for text in said[3])
        assert json.loads(said[4][0]) == [True]
        assert [ends[i] for i in (0, 2, 3, 4)] == [["stop"], ["stop"], ["stop", "stop"], ["stop"]]
        expected = solo(pair[0], ASKED["messages"], 60, seed=(7, 0), temperature=0.9)
        assert said[1] == said[5] == [expected.text]
        again = await server.stream(CHAT, **bodies[0][1], stream_options={"include_usage": True})
        pieces = [event["choices"][0]["delta"]["content"] for event in again if event["choices"]]
        assert "".join(pieces) == said[0][0]
        assert again[-1]["usage"] == answers[0]["usage"]

    serve(pair, use)


@pytest.mark.parametrize(
    ("asked", "field", "told"),
    [
        ({"response_format": schema({"type": "objekt"})}, "response_format", "objekt"),
        ({"response_format": schema({"properties": {"a": {"frob": 1}}})}, "response_format", "'frob'"),
        ({"response_format": schema({"const": "x" * 40000})}, "response_format", "may have"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "with a schema"),
        ({"response_format": schema({}, frob=1)}, "response_format", "has no 'frob'"),
        ({"response_format": {"type": "xml"}}, "response_format", "must be text"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos", "contradicts response_format"),
        ({"structured_outputs": {"regex": "["}}, "structured_outputs", "not taken"),
        ({"structured_outputs": {"regex": 3}}, "structured_outputs", "must be a text"),
        ({"structured_outputs": {}}, "structured_outputs", "one of"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs", "has no 'grammar'"),
        (
            {"structured_outputs": {"json": {}}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "contra",
        ),
    ],
)
def test_a_wrong_form_is_told(pair, asked, field, told):
    async def use(server):
        answer = await server.client.post(CHAT, json=ASKED | asked)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == field
        assert told in error["message"]
        assert "\n" not in error["message"]

    serve(pair, use)


def test_a_grammar_that_gives_up_ends_its_request_only(pair, monkeypatch):
    async def use(server):
        free, broken = await asyncio.gather(
            server.post(CHAT, **ASKED, seed=7),
            server.client.post(CHAT, json=ASKED | {"structured_outputs": {"json": {"const": "given up"}}}),
        )
        assert broken.status_code == 500
        assert "too complex" in broken.json()["error"]["message"]
        assert (
            free["choices"][0]["message"]["content"]
            == solo(pair[0], ASKED["messages"], 60, seed=(7, 0), temperature=0.9).text
        )

    monkeypatch.setattr(TextMatcher, "allowed", lambda self: None)
    monkeypatch.setattr(TextMatcher, "take", lambda self, token: False)
    serve(pair, use)


def test_a_server_without_the_library_says_so(target_path, drafter_path, monkeypatch):
    """A target of its own: what grammars need is kept for each."""
    target = load_target(target_path)
    monkeypatch.setattr("specdec.sampling.json_grammar.find_spec", lambda name: None)

    async def use(server):
        answer = await server.client.post(CHAT, json=ASKED | {"response_format": {"type": "json_object"}})
        assert answer.status_code == 400
        assert "llguidance" in answer.json()["error"]["message"]

    serve((target, load_drafter(drafter_path, target)), use)
