"""Access: keys, names of the host, web pages, idle connections, prompts of megabytes."""

import asyncio
import errno
import time

import pytest
from clients import CHAT, HELLO, TEXT, listening, served
from fastapi import FastAPI, Request
from helpers import main_of, refused

from specdec.cli.commands import parse
from specdec.serve import serve_command
from specdec.serve.app import _Failures
from specdec.serve.serve_command import KEY, closing_protocol, hosts_of, names_in

main = main_of("serve")

ASK = {"prompt": "Hi", "max_tokens": 1}


@served(key="schlüssel-🔑")
async def test_a_key_is_any_text_and_its_scheme_any_case(server):
    """It guards what decodes or names the model."""
    for sent in ("bearer schlüssel-🔑", "BEARER  schlüssel-🔑"):
        answer = await server.client.post(TEXT, json=ASK, headers={"authorization": sent.encode()})
        assert answer.status_code == 200, sent
    for sent in ("Basic schlüssel-🔑".encode(), b"Bearer schl\xfcssel", b"Bearer", b"", b"\xff\xfe"):
        for path in ("/health", "/version", "/metrics"):
            assert (await server.client.get(path, headers={"authorization": sent})).status_code == 200
        for method, path in (("GET", "/v1/models"), ("POST", TEXT), ("POST", "/tokenize")):
            answer = await server.client.request(method, path, headers={"authorization": sent}, content=b"{")
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")


def test_an_empty_key_is_refused(monkeypatch):
    monkeypatch.setattr(serve_command, "listen", None)
    assert "is empty" in refused(main, "--no-draft", "--api-key", "")
    monkeypatch.setenv(KEY, " ")
    assert "is empty" in refused(main, "--no-draft")


@served(callers=(["localhost", "::1"], ["http://page.example"]))
async def test_hosts_pages_and_bodies_of_strangers(server):
    for headers, status in (
        ({"host": "localhost:8000"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"host": "evil.example"}, 403),
        ({"host": "localhost.evil.example"}, 403),
        ({"host": ""}, 403),
        ({"host": "localhost", "origin": "http://localhost"}, 200),
        ({"host": "localhost", "origin": "http://page.example"}, 200),
        ({"host": "localhost", "origin": "http://evil.example"}, 403),
        ({"host": "localhost", "origin": "null"}, 403),
        ({"host": "localhost", "content-type": "text/plain;charset=UTF-8"}, 415),
        ({"host": "localhost", "content-type": "Text/Plain"}, 415),
        ({"host": "localhost", "content-encoding": "GZip"}, 415),
        ({"host": "localhost", "content-encoding": "identity"}, 200),
        ({"host": "localhost", "content-type": "application/json; charset=utf-8"}, 200),
    ):
        answer = await server.client.post(TEXT, json=ASK, headers=headers)
        assert answer.status_code == status, headers
        assert (status == 200) == ("error" not in answer.json())
    assert answer.headers["x-request-id"]
    answer = await server.client.get("/health", headers={"host": "evil.example", "x-request-id": "abc"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (403, "abc")
    server.client.headers["host"] = "localhost"
    counted = await server.counters()
    assert [counted[f"specdec:requests_refused_total {status}"] for status in (403, 415)] == [6, 3]


def test_a_server_for_this_machine_answers_to_its_names_only():
    assert hosts_of(parse("serve", [])) == ["localhost", "127.0.0.1", "::1", "[::1]"]
    assert hosts_of(parse("serve", ["--host", "0.0.0.0"])) == ["*"]
    assert hosts_of(parse("serve", ["--host", "0.0.0.0", "--allowed-hosts", "A.example, b"])) == ["a.example", "b"]
    assert names_in("http://localhost:3000/, https://Page.example") == ["http://localhost:3000", "https://page.example"]


@served()
async def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenized(server, monkeypatch):
    long, seen = "a" * 4_000_000, []
    original = type(server.target.tokenizer).__call__

    def call(self, text, **how):
        seen.append(text)
        return original(self, text, **how)

    monkeypatch.setattr(type(server.target.tokenizer), "__call__", call)
    start = time.monotonic()
    await server.refused(400, "16 texts at most, got 17 prompts with n 1", "prompt", json={"prompt": ["a"] * 17})
    assert seen == []
    for path, body, field in (
        (TEXT, {"prompt": long}, "prompt"),
        (TEXT, {"prompt": ["a", long]}, "prompt"),
        ("/tokenize", {"prompt": long}, "prompt"),
        (CHAT, {"messages": [HELLO[0], {"role": "user", "content": long}]}, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": long}]}, "messages"),
    ):
        await server.refused(400, "has 4000[0-9]{3} characters, and 100 tokens hold", field, path=path, json=body)
    assert time.monotonic() - start < 5
    assert all(len(text) < 1000 for text in seen)


@pytest.mark.parametrize(("module", "name"), [("httptools_impl", "HttpToolsProtocol"), ("h11_impl", "H11Protocol")])
def test_idle_connections_are_closed(monkeypatch, module, name):
    protocol = getattr(pytest.importorskip(f"uvicorn.protocols.http.{module}"), name)
    monkeypatch.setattr("uvicorn.protocols.http.auto.AutoHTTPProtocol", protocol)
    monkeypatch.setattr(serve_command, "IDLE", 0.3)
    app = FastAPI()

    @app.post("/read")
    async def read(request: Request) -> int:
        await asyncio.sleep(0.6)  # longer than a client may be silent: this one waits
        return len(await request.body())

    async def waited(port: int, *parts: bytes) -> tuple[bytes, float]:
        """What is answered, and the seconds from the last part to the end of the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0.2)
        start = time.monotonic()
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        return answer, time.monotonic() - start

    async def run() -> None:
        head = b"POST /read HTTP/1.1\r\nhost: a\r\ncontent-length: 6\r\n"
        async with listening(app, http=closing_protocol(), timeout_graceful_shutdown=1) as port:
            for parts in ((), (head[:9], head[9:20]), (head, b"\r\n", b"abc")):
                answer, seconds = await waited(port, *parts)
                assert answer == b""
                assert seconds < 5, parts
            answer, _ = await waited(port, head + b"connection: close\r\n\r\n", b"abc", b"def")
            assert answer.endswith(b"\r\n\r\n6")

    asyncio.run(run())


def test_a_lack_of_file_descriptors_is_one_line(capsys):
    loop, handler = asyncio.new_event_loop(), _Failures()
    for _ in range(1000):
        handler(loop, {"message": "socket.accept() out of system resource", "exception": OSError(errno.EMFILE, "many")})
    loop.close()
    warning = "warning: no file descriptor is free, so new connections wait: raise `ulimit -n`\n"
    assert capsys.readouterr().err == warning
