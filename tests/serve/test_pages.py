"""The chat page at `/`, what it asks the server for, and the description of the HTTP interface."""

import asyncio
import json
import re
from pathlib import Path

import pytest
from browser import browser, needs_chromium
from clients import CHAT, HELLO, TEXT, content, listening, served, solo

from specdec.engine.engine import Engine
from specdec.serve.app import make_app
from specdec.serve.scheduler import Scheduler
from specdec.serve.service import Service
from specdec.trees import DynamicTree

ASKED = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}


def marked(choices: list[dict]) -> list[dict]:
    return [token for choice in choices for token in choice["speculative"]["tokens"]]


@pytest.mark.parametrize("interval", [None, 1, 3])
def test_responses_mark_the_tokens_that_were_drafted(pair, interval):
    @served(reporting={"acceptance": "summary", "stream_interval": interval})
    async def test(server):
        for path, asked, prompt in ((CHAT, {"messages": HELLO}, HELLO), (TEXT, {"prompt": "The quick"}, "The quick")):
            expected = solo(server.target, prompt, 40, eos=frozenset())
            body = ASKED | asked | {"speculative": {"report": True}}
            whole = await server.post(path, **body)
            tokens = marked(whole["choices"])
            assert "".join(token["text"] for token in tokens) == expected.text
            assert len(tokens) == whole["usage"]["completion_tokens"] == 40
            reported = whole["metrics"]["speculative_decoding"]
            assert sum(token["drafted"] for token in tokens) == reported["num_accepted_draft_tokens"] > 0
            assert whole["choices"][0]["speculative"]["rounds"] == reported["num_spec_steps"]
            assert not tokens[0]["drafted"], "the prefill's token"
            events = [event["choices"][0] for event in await server.stream(path, **body)]
            assert marked(events) == tokens
            if interval is not None:
                counts = [len(event["speculative"]["tokens"]) for event in events]
                assert counts == [interval] * (40 // interval) + [1] * (40 % interval)
            assert events[-1]["speculative"]["rounds"] == reported["num_spec_steps"]
            rounds = [event["speculative"]["rounds"] for event in events]
            assert rounds == sorted(rounds)
            assert content([{"choices": [event]} for event in events]) == expected.text

    test(pair)


@served()
async def test_nothing_is_marked_unless_a_request_asks(server):
    for wish in ({}, {"speculative": {"steps": 2}}, {"speculative": {"report": False}}):
        assert "speculative" not in (await server.post(TEXT, prompt="Hi", **ASKED, **wish))["choices"][0]
    plain = await server.post(TEXT, prompt="Hi", **ASKED, speculative={"off": True, "report": True})
    (choice,) = plain["choices"]
    assert choice["speculative"]["rounds"] == 39
    assert not any(token["drafted"] for token in marked([choice]))
    stopped = ASKED | {"stop": [choice["text"][8:10]], "speculative": {"report": True}}
    (choice,) = (await server.post(TEXT, prompt="Hi", **stopped))["choices"]
    assert "".join(token["text"] for token in marked([choice])) == choice["text"]


@served(key="secret", callers=(["test"], []))
async def test_the_pages_need_no_key_and_hold_to_the_names_of_the_host(server):
    del server.client.headers["authorization"]
    for path in ("/", "/docs", "/openapi.json"):
        assert (await server.client.get(path)).status_code == 200
        assert (await server.client.get(path, headers={"host": "evil.example"})).status_code == 403
        assert (await server.client.get(path, headers={"origin": "http://evil.example"})).status_code == 403
    page = await server.client.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert not re.search(r"""(src|href)\s*=\s*["'](https?:)?//|@import|url\(""", page.text), "nothing from elsewhere"
    assert "Without a network read" in (await server.client.get("/docs")).text
    assert (await server.client.get("/v1/models")).status_code == 401


@served()
async def test_the_interface_is_described(server):
    described = (await server.client.get("/openapi.json")).json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/health"} < set(described["paths"])
    assert "/" not in described["paths"]
    body = described["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/ChatAsk"}
    for ref in re.findall(r'"\$ref": "([^"]+)"', json.dumps(described)):
        assert ref.removeprefix("#/components/schemas/") in described["components"]["schemas"]
    (model,) = (await server.client.get("/v1/models")).json()["data"]
    assert model["speculative"]["tree"] == "3/3/9"
    assert model["speculative"]["adaptive"] is None


def in_browser(pair, folder: Path, use, key: str | None = None) -> None:
    """Let `use(tab, url)` look at a server of this pair, in a thread."""
    target, drafter = pair
    scheduler = Scheduler(Engine(target, drafter, DynamicTree(3, 3, 9)), rows=4, room=250, model="tiny")
    app = make_app(Service(target, scheduler, "tiny"), key, ["127.0.0.1"])

    def look(url: str) -> None:
        with browser(folder) as tab:
            use(tab, url)
            assert tab.errors == []

    async def run() -> None:
        async with listening(app) as port:
            await asyncio.to_thread(look, f"http://127.0.0.1:{port}/")

    asyncio.run(run())


def send(tab, text: str) -> None:
    tab.run(f"at('prompt').value = {json.dumps(text)}; at('ask').requestSubmit()")
    tab.until("!running")


SHOWN = "[...document.querySelectorAll('article .text')].map(box => box.textContent)"
WRONG = "[...document.querySelectorAll('.wrong')].map(box => box.textContent)"


@needs_chromium
def test_a_chat_in_a_browser(pair, tmp_path):
    """Text as it is decoded alone, drafted tokens in colour, figures, a second turn, plain decoding, errors."""
    question = [{"role": "user", "content": "The lazy dog"}]
    expected = solo(pair[0], question, 40)

    def use(tab, url):
        tab.open(url)
        tab.until("at('model').textContent.startsWith('tiny, drafted by')")
        assert "3/3/9" in tab.run("at('tree').textContent")
        tab.run("at('tokens').value = 40")
        send(tab, question[0]["content"])
        assert tab.run(SHOWN) == [expected.text]
        drafted = tab.run("document.querySelectorAll('.drafted').length")
        assert drafted > 1  # one is the legend's
        colour = "getComputedStyle(document.querySelector('.text .drafted')).backgroundColor"
        assert tab.run(colour) == "rgb(201, 240, 213)"
        figures = tab.run("document.querySelector('dl.figures').innerText")
        assert re.search(r"tau\s*\d\.\d\d", figures)
        assert re.search(r"tokens/s\s*\d+", figures)
        send(tab, "And now?")
        turns = [*question, {"role": "assistant", "content": expected.text}, {"role": "user", "content": "And now?"}]
        assert tab.run(WRONG) == []
        assert tab.run(SHOWN)[1] == solo(pair[0], turns, 40).text
        tab.run("at('clear').click(); at('steps').value = 0; at('format').value = 'plain'; at('seed').value = 7")
        tab.run("at('temperature').value = 1.3")
        send(tab, "The quick")
        assert tab.run(SHOWN) == [solo(pair[0], "The quick", 40, seed=(7, 0), temperature=1.3).text]
        assert tab.run("document.querySelectorAll('.text .drafted').length") == 0
        tab.run("at('tokens').max = 1000; at('tokens').value = 1000")
        send(tab, "The quick")
        assert "1000 are asked for" in tab.run(WRONG)[0]
        assert tab.run("at('prompt').value") == "The quick", "the message comes back"

    in_browser(pair, tmp_path, use)


@needs_chromium
def test_a_key_in_a_browser(pair, tmp_path):
    def use(tab, url):
        tab.open(url)
        assert "401" in tab.until(WRONG + ".join()")
        tab.run("at('key').value = 'schlüssel'; at('key').dispatchEvent(new Event('change'))")
        tab.until("at('model').textContent.startsWith('tiny')")
        tab.run("at('tokens').value = 5")
        send(tab, "Hi")
        assert len(tab.run(SHOWN)) == 1
        assert tab.run(WRONG) == []

    in_browser(pair, tmp_path, use, "schlüssel")
