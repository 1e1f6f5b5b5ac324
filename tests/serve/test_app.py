"""OpenAI's interface: what clients get is what the target says alone, whole or in chunks, and every mistake is told."""

import asyncio
import json
import re
import threading

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx2")

from clients import CHAT, HELLO, TEXT, serve, solo

from specdec.serve.jobs import Delta
from specdec.serve.replies import Choice
from specdec.serve.service import Limits


def content(events: list[dict]) -> str:
    """The text of a stream's first choice."""
    choices = [event["choices"][0] for event in events if event["choices"]]
    return "".join(choice["delta"]["content"] if "delta" in choice else choice["text"] for choice in choices)


def test_chat_and_completions_whole_and_streamed(pair):
    """Greedy and drawn, of a random target whose tokens are parts of characters."""

    async def use(server):
        for path, asked, prompt in ((CHAT, {"messages": HELLO}, HELLO), (TEXT, {"prompt": "The quick"}, "The quick")):
            for sampling in ({"temperature": 0}, {"temperature": 1.3, "top_k": 50, "seed": 5}):
                drawn = {k: v for k, v in sampling.items() if k != "seed"}
                expected = solo(pair[0], prompt, 40, seed=(sampling.get("seed", 0), 0), **drawn)
                body = {"model": "tiny", "max_tokens": 40} | asked | sampling
                whole = await server.post(path, **body)
                (choice,) = whole["choices"]
                assert (choice["message"]["content"] if path == CHAT else choice["text"]) == expected.text
                assert choice["finish_reason"] == expected.finish
                usage = whole["usage"]
                assert usage["completion_tokens"] == len(expected.ids)
                assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]
                events = await server.stream(path, **body, stream_options={"include_usage": True})
                assert content(events) == expected.text
                assert [event["choices"] == [] for event in events] == [False] * (len(events) - 1) + [True]
                assert events[-1]["usage"] == usage
                ends = [event["choices"][0]["finish_reason"] for event in events[:-1]]
                assert ends == [None] * (len(events) - 2) + [expected.finish]
                if path == CHAT:
                    assert [event["choices"][0]["delta"].get("role") for event in events[:2]] == ["assistant", None]
                assert "�" in expected.text or not any("�" in content([event]) for event in events[:-1])

    serve(pair, use)


def test_no_character_is_torn_between_chunks(pair):
    """Whose bytes are tokens of their own."""
    target, text = pair[0], "Garçon: ₿, 日本語, 🙂🙃 ..."
    ids = target.tokenizer(text, add_special_tokens=False)["input_ids"]
    for size in range(1, 5):
        for stops, expected in (([], text), (["n: ₿"], "Garço"), (["🙃"], text[: text.index("🙃")]), (["...."], text)):
            choice, pieces = Choice(0, target.tokenizer, stops), []
            for start in range(0, len(ids), size):
                finish = "length" if start + size >= len(ids) else None
                pieces.append(choice.take(Delta(None, ids[start : start + size], finish=finish)).text)
            assert "".join(pieces) == expected
            assert not any("�" in piece for piece in pieces)
            assert sum(map(bool, pieces)) >= len(expected) // 5


def test_stop_strings_inside_accepted_paths(pair):
    """Every piece of two to four characters of the text, as it may begin and end within tokens."""
    target, prompt = pair[0], "The lazy dog"
    text = solo(target, prompt, 40, eos=frozenset()).text

    async def use(server):
        for start in range(3, min(len(text) - 4, 30), 4):
            stop = [text[start : start + 2 + start % 3], "never there"]
            expected = solo(target, prompt, 40, stop=stop, eos=frozenset())
            body = {
                "prompt": prompt,
                "max_tokens": 40,
                "temperature": 0,
                "stop": stop,
                "ignore_eos": True,
                "logprobs": 0,
            }
            whole = await server.post(TEXT, **body)
            (choice,) = whole["choices"]
            assert (choice["text"], choice["finish_reason"]) == (expected.text, "stop")
            assert stop[0] not in choice["text"]
            assert whole["usage"]["completion_tokens"] == len(expected.ids)
            assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected.logprobs, abs=1e-4)
            events = await server.stream(TEXT, **body)
            assert content(events) == expected.text
            told = [x for event in events for x in event["choices"][0]["logprobs"]["token_logprobs"]]
            assert len(told) == len(expected.ids)

    serve(pair, use)


def test_n_and_seeds_and_prompts_of_ids(pair):
    target, prompts = pair[0], ["The quick", "Ein Café"]
    ids = [target.tokenizer(prompt)["input_ids"] for prompt in prompts]
    body = {"max_tokens": 12, "temperature": 1.0, "seed": 9, "n": 2}

    async def use(server):
        for given in (prompts, ids):
            whole = await server.post(TEXT, prompt=given, **body)
            expected = [solo(target, prompts[i // 2], 12, seed=(9, i), temperature=1.0) for i in range(4)]
            assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
            assert [choice["text"] for choice in whole["choices"]] == [one.text for one in expected]
            assert whole["usage"]["completion_tokens"] == sum(len(one.ids) for one in expected)
            assert whole["usage"]["prompt_tokens"] == sum(map(len, ids))
        assert len({one.text for one in expected}) == 4
        events = await server.stream(TEXT, prompt=prompts, **body)
        for i, one in enumerate(expected):
            assert content([e for e in events if e["choices"][0]["index"] == i]) == one.text
        unseeded = [await server.post(TEXT, prompt="The quick", max_tokens=30, ignore_eos=True) for _ in range(2)]
        assert unseeded[0]["choices"][0]["text"] != unseeded[1]["choices"][0]["text"]

    serve(pair, use)


def test_log_probabilities(pair):
    async def use(server):
        expected = solo(pair[0], HELLO, 12)
        asked = {"messages": HELLO, "max_completion_tokens": 12, "temperature": 0, "logprobs": True}
        whole = (await server.post(CHAT, **asked))["choices"][0]["logprobs"]["content"]
        streamed = [
            entry for e in await server.stream(CHAT, **asked) for entry in e["choices"][0]["logprobs"]["content"]
        ]
        assert streamed == whole
        assert [entry["logprob"] for entry in whole] == pytest.approx(expected.logprobs, abs=1e-4)
        assert [entry["token"] for entry in whole] == [pair[0].tokenizer.decode([i]) for i in expected.ids]
        assert all(bytes(entry["bytes"]).decode() == entry["token"] for entry in whole)
        plain = await server.post(TEXT, prompt="The", max_tokens=9, temperature=0, logprobs=0)
        told = plain["choices"][0]["logprobs"]
        assert told["text_offset"] == [len("".join(told["tokens"][:i])) for i in range(len(told["tokens"]))]
        streamed = [e["choices"][0]["logprobs"] for e in await server.stream(
            TEXT, prompt="The", max_tokens=9, temperature=0, logprobs=0, stream_options={"continuous_usage_stats": True}
        )]  # fmt: skip
        assert [x for part in streamed for x in part["text_offset"]] == told["text_offset"]

    serve(pair, use)


def test_the_likeliest_tokens_are_told(pair):
    """Best first. At temperature 0 the emitted token is the first; of a completion a drawn token comes last, unless it
    is among them."""

    async def use(server):
        asked = {"messages": HELLO, "max_completion_tokens": 12, "temperature": 0, "logprobs": True, "top_logprobs": 3}
        whole = (await server.post(CHAT, **asked))["choices"][0]["logprobs"]["content"]
        streamed = [
            entry for e in await server.stream(CHAT, **asked) for entry in e["choices"][0]["logprobs"]["content"]
        ]
        assert streamed == whole
        for entry in whole:
            told = entry["top_logprobs"]
            assert len(told) == 3
            assert told[0] == {name: entry[name] for name in ("token", "logprob", "bytes")}
            assert [x["logprob"] for x in told] == sorted((x["logprob"] for x in told), reverse=True)
        drawn = {"prompt": "The", "max_tokens": 9, "temperature": 1.5, "seed": 3, "logprobs": 2}
        told = (await server.post(TEXT, **drawn))["choices"][0]["logprobs"]
        for token, logprob, likely in zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True):
            assert likely[token] >= logprob
            assert len(likely) <= 3
            assert max(likely.values()) == next(iter(likely.values()))
        streamed = [e["choices"][0]["logprobs"] for e in await server.stream(TEXT, **drawn)]
        assert [x for part in streamed for x in part["top_logprobs"]] == told["top_logprobs"]

    serve(pair, use)


def test_many_at_once_and_the_counters_add_up(pair):
    """50 requests, 30 at once, for 4 rows; malformed ones, ones that are too long, and a full queue among them."""
    target, gate = pair[0], asyncio.Semaphore(30)

    async def one(server, i: int) -> dict:
        how = {"temperature": (0, 0.9)[i % 2], "max_tokens": 3 + i % 9, "seed": i, "ignore_eos": i % 3 == 0}
        prompt = "The quick brown fox"[: 3 + i % 16]
        if i % 10 == 9:
            bad = ({"max_tokens": 0}, {"prompt": "x" * 500})[i % 4 // 2]
            assert (await server.client.post(TEXT, json={"prompt": prompt} | how | bad)).status_code == 400
            return {"prompt_tokens": 0, "completion_tokens": 0}
        stop = ["e", "o "] if i % 4 == 1 else []
        eos = frozenset() if how["ignore_eos"] else None
        expected = solo(
            target, prompt, how["max_tokens"], seed=(i, 0), stop=stop, eos=eos, temperature=how["temperature"]
        )
        async with gate:
            if i % 2:
                events = await server.stream(
                    TEXT, prompt=prompt, stop=stop or None, stream_options={"include_usage": True}, **how
                )
                text, usage = content(events), events[-1]["usage"]
            else:
                whole = await server.post(TEXT, prompt=prompt, stop=stop, **how)
                text, usage = whole["choices"][0]["text"], whole["usage"]
        assert text == expected.text
        assert usage["completion_tokens"] == len(expected.ids)
        return usage

    async def use(server):
        used = await asyncio.gather(*(one(server, i) for i in range(50)))
        told = await server.counters()
        assert told["vllm:generation_tokens_total"] == sum(usage["completion_tokens"] for usage in used)
        assert told["vllm:prompt_tokens_total"] == sum(usage["prompt_tokens"] for usage in used)
        ended = [told[f'vllm:request_success_total{{,finished_reason="{reason}"}}'] for reason in ("stop", "length")]
        assert sum(ended) == 45
        assert told['specdec:requests_refused_total{,status="400"}'] == 5
        assert told["vllm:time_to_first_token_seconds_count"] == 45
        assert told["vllm:num_requests_running"] == told["vllm:num_requests_waiting"] == 0
        assert told["specdec:tau"] == told["specdec:round_tokens_total"] / told["specdec:sequence_rounds_total"] > 1

    serve(pair, use)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_vanishes(pair, stream):
    """While it is decoded, and while it waits for the only row."""

    async def use(server):
        step, hold = server.scheduler.engine.step, threading.Event()
        server.scheduler.engine.step = lambda: (step(), hold.wait())[0]  # so that no text ends before they vanish
        body = {"prompt": "The", "max_tokens": 90, "ignore_eos": True, "stream": stream, "temperature": 0}
        calls, gone = [asyncio.Queue(), asyncio.Queue()], asyncio.Event()
        for messages in calls:
            messages.put_nowait({"type": "http.request", "body": json.dumps(body).encode()})
        tasks = [asyncio.create_task(call(server.app, messages, gone)) for messages in calls]
        try:
            while not (server.scheduler.running and server.scheduler.queue):
                await asyncio.sleep(0.001)
            jobs = [*server.scheduler.running.values(), *server.scheduler.queue]
            gone.set()
            for messages in calls:
                messages.put_nowait({"type": "http.disconnect"})
            while not all(job.unwanted for job in jobs):
                await asyncio.sleep(0.001)
        finally:
            hold.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        while server.scheduler.running or server.scheduler.queue:
            await asyncio.sleep(0.001)
        assert (await server.counters())['vllm:request_success_total{,finished_reason="abort"}'] == 2
        expected = solo(pair[0], "The", 20)
        again = await server.post(TEXT, prompt="The", max_tokens=20, temperature=0)
        assert again["choices"][0]["text"] == expected.text

    async def in_time(server):
        await asyncio.wait_for(use(server), 300)

    serve(pair, in_time, rows=1)


async def call(app, messages: asyncio.Queue, gone: asyncio.Event) -> None:
    """A completion as a web server asks for it, by a client that may go away."""

    async def send(message) -> None:
        if gone.is_set():
            raise OSError("the client went away")

    path = {"path": TEXT, "raw_path": TEXT.encode(), "query_string": b"", "root_path": "", "headers": []}
    scope = {"type": "http", "method": "POST", "http_version": "1.1", "scheme": "http", "server": ("test", 80)} | path
    await app(scope | {"asgi": {"version": "3.0", "spec_version": "2.4"}}, messages.get, send)


WRONG = [
    (CHAT, {}, "messages", "messages is missing"),
    (CHAT, {"messages": []}, "messages", "messages is empty"),
    (CHAT, {"messages": "hi"}, "messages", "must be a list"),
    (CHAT, {"messages": [{"role": "king", "content": "x"}]}, "messages", r"messages\[0\].role must be one of"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "parts of type 'text'"),
    (CHAT, {"messages": HELLO, "max_completion_tokens": 1000}, "max_completion_tokens", "but a text may have 100 here"),
    (CHAT, {"messages": HELLO, "top_logprobs": 3}, "top_logprobs", "needs logprobs to be true"),
    (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "must be at most 20, got 21"),
    (CHAT, {"messages": HELLO, "response_format": {"type": "grammar"}}, "response_format", "must be text, json_object"),
    (TEXT, {"prompt": 3}, "prompt", "prompt must be a text"),
    (TEXT, {"prompt": ""}, "prompt", "the prompt is empty"),
    (TEXT, {"prompt": [[]]}, "prompt", "prompt must be a text"),
    (TEXT, {"prompt": [10**9]}, "prompt", "the prompt holds token 1000000000"),
    (TEXT, {"prompt": [-1]}, "prompt", "the prompt holds token"),
    (TEXT, {"prompt": [1] * 100}, None, "but a text may have 100 here"),
    (TEXT, {"prompt": "x", "temperature": "hot"}, "temperature", "must be a number"),
    (TEXT, {"prompt": "x", "top_p": 0}, "top_p", "must be above 0"),
    (TEXT, {"prompt": "x", "n": 17}, "n", "16 texts at most, got n 17"),
    (TEXT, {"prompt": ["x"] * 17}, "n", "got 17 prompts with n 1"),
    (TEXT, {"prompt": "x", "stop": ["a", ""]}, "stop", "at least one character"),
    (TEXT, {"prompt": "x", "stop": ["a"] * 17}, "stop", "16 strings at most"),
    (TEXT, {"prompt": "x", "logprobs": 21}, "logprobs", "must be at most 20, got 21"),
    (TEXT, {"prompt": "x", "echo": True}, "echo", "is not built"),
    (TEXT, {"prompt": "x", "min_tokens": 4}, "min_tokens", "is not built"),
    (TEXT, {"prompt": "x", "temprature": 1}, "temprature", "there is no parameter 'temprature'"),
    (TEXT, {"prompt": "x", "\ud800": 1}, "\ufffd" * 3, "there is no parameter"),
    (CHAT, {"messages": [{"role": "user", "\ud800": 1}]}, "messages", "which is not built"),
    (TEXT, {"prompt": "x", "stream": True, "stream_options": {"usage": True}}, "stream_options", "has no 'usage'"),
    (TEXT, {"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
    ("/tokenize", {"text": "x"}, "prompt", "give a text as prompt"),
    ("/detokenize", {"tokens": ["x"]}, "tokens", "a list of ids from 0"),
]


def test_what_is_wrong_is_told_in_openais_form(pair):
    async def use(server):
        async def refused(status: int, message: str, param=None, code=None, path=TEXT, **how) -> None:
            answer = await server.client.request(how.pop("method", "POST"), path, **how)
            assert answer.status_code == status, (path, how, answer.text)
            error = answer.json()["error"]
            assert re.search(message, error["message"]), error
            assert "\n" not in error["message"]
            kinds = {404: "not_found_error", 429: "rate_limit_error", 503: "server_error"}
            assert (error["param"], error["type"]) == (param, kinds.get(status, "invalid_request_error"))
            assert code is None or error["code"] == code

        for path, body, param, message in WRONG:
            await refused(400, message, param, path=path, content=json.dumps(body).encode())
        await refused(404, "no model 'gpt'", "model", "model_not_found", json={"model": "gpt", "prompt": "x"})
        await refused(400, "not valid JSON", content=b"{")
        await refused(400, "must be a JSON object", content=b"[1]")
        await refused(400, "must be a JSON object", content=b"[1]", path="/tokenize")
        await refused(413, "more than 2000 bytes", code="request_too_large", content=b" " * 3000)
        await refused(404, "GET /nothing is not served", path="/nothing", method="GET")
        await refused(405, "GET /v1/completions is not served", method="GET")
        await refused(429, "try again later", code="queue_full", json={"prompt": "x", "n": 6})
        assert (await server.counters())['specdec:requests_refused_total{,status="429"}'] == 1
        server.scheduler.close()
        await refused(503, "the server stops", json={"prompt": "x"})
        assert (await server.client.get("/health")).status_code == 503

    serve(pair, use, limits=Limits(body_bytes=2000), queue=1)


def test_a_key_guards_what_decodes(pair):
    async def use(server):
        for path in ("/health", "/version", "/metrics", "/v1/models"):
            assert (await server.client.get(path)).status_code == 200
        for headers in ({"authorization": "Bearer wrong"}, {"authorization": ""}, {"authorization": "secret"}):
            assert (await server.client.get("/health", headers=headers)).status_code == 200
            for method, path in (("GET", "/v1/models"), ("POST", TEXT), ("POST", "/tokenize")):
                answer = await server.client.request(method, path, headers=headers, content=b"{")
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"

    serve(pair, use, key="secret")


def test_what_is_told_of_the_model(pair):
    async def use(server):
        (model,) = (await server.client.get("/v1/models")).json()["data"]
        assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 100)
        told = await server.post("/tokenize", prompt="Ein Café")
        assert told["tokens"] == pair[0].tokenizer("Ein Café")["input_ids"]
        assert told["count"] == len(told["tokens"])
        assert await server.post("/detokenize", tokens=told["tokens"]) == {"prompt": "Ein Café"}
        chat = await server.post("/tokenize", messages=HELLO)
        answer = await server.post(CHAT, messages=HELLO, max_tokens=1)
        assert answer["usage"]["prompt_tokens"] == chat["count"]

    serve(pair, use)


def test_metrics_are_prometheus_text(pair):
    async def use(server):
        await server.post(TEXT, prompt="x", max_tokens=5)
        text = (await server.client.get("/metrics")).text
        series = re.compile(r'[a-z_]+:[a-z0-9_]+\{model_name="tiny",engine="0"(,[a-z_]+="[^"]*")?\} [0-9.e+-]+')
        for line in text.splitlines():
            assert line.startswith(("# HELP ", "# TYPE ")) or series.fullmatch(line), line
        told = await server.counters()
        buckets = [x for name, x in told.items() if name.startswith("vllm:e2e_request_latency_seconds_bucket")]
        assert buckets == sorted(buckets)
        assert buckets[-1] == told["vllm:e2e_request_latency_seconds_count"] == 1

    serve(pair, use)
