"""OpenAI's interface: clients get the target's own text, whole or in chunks, and an error for every mistake."""

import asyncio
import json
import threading

import pytest
from clients import CHAT, HELLO, TEXT, content, listening, served, solo
from prometheus_client.parser import text_string_to_metric_families

from specdec.serve.jobs import Delta
from specdec.serve.replies import Choice


@served()
async def test_chat_and_completions_whole_and_streamed(server):
    """Greedy and drawn, of a random target whose tokens are parts of characters."""
    for path, asked, prompt in ((CHAT, {"messages": HELLO}, HELLO), (TEXT, {"prompt": "The quick"}, "The quick")):
        for sampling in ({"temperature": 0}, {"temperature": 1.3, "top_k": 50, "seed": 5}):
            drawn = {k: v for k, v in sampling.items() if k != "seed"}
            expected = solo(server.target, prompt, 40, seed=(sampling.get("seed", 0), 0), **drawn)
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


def test_no_character_is_torn_between_chunks(pair):
    """A target with bytes as tokens."""
    target, text = pair[0], "Garçon: ₿, 日本語, 🙂🙃 ..."
    ids = target.tokenizer(text, add_special_tokens=False)["input_ids"]
    for size in range(1, 5):
        for stops, expected in (([], text), (["n: ₿"], "Garço"), (["🙃"], text[: text.index("🙃")]), (["...."], text)):
            choice, pieces = Choice(0, None, target.tokenizer, stops), []
            for start in range(0, len(ids), size):
                finish = "length" if start + size >= len(ids) else None
                pieces.append(choice.take(Delta(None, ids[start : start + size], finish=finish)).text)
            assert "".join(pieces) == expected
            assert not any("�" in piece for piece in pieces)
            assert sum(map(bool, pieces)) >= len(expected) // 5


@served()
async def test_stop_strings_inside_accepted_paths(server):
    """Every piece of two to four characters of the text, as it may begin and end within tokens."""
    target, prompt = server.target, "The lazy dog"
    text = solo(target, prompt, 40, eos=frozenset()).text
    for start in range(3, min(len(text) - 4, 30), 4):
        stop = [text[start : start + 2 + start % 3], "never there"]
        expected = solo(target, prompt, 40, stop=stop, eos=frozenset())
        body = {"prompt": prompt, "max_tokens": 40, "temperature": 0, "stop": stop, "ignore_eos": True, "logprobs": 0}
        whole = await server.post(TEXT, **body)
        (choice,) = whole["choices"]
        assert (choice["text"], choice["finish_reason"]) == (expected.text, "stop")
        assert stop[0] not in choice["text"]
        assert whole["usage"]["completion_tokens"] == len(expected.ids)
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected.logprobs, abs=1e-4)
        events = await server.stream(TEXT, **body)
        assert content(events) == expected.text
        seen = [x for event in events for x in event["choices"][0]["logprobs"]["token_logprobs"]]
        assert len(seen) == len(expected.ids)


@served()
async def test_n_and_seeds_and_prompts_of_ids(server):
    target, prompts = server.target, ["The quick", "Ein Café"]
    ids = [target.tokenizer(prompt)["input_ids"] for prompt in prompts]
    body = {"max_tokens": 12, "temperature": 1.0, "seed": 9, "n": 2}
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


@served()
async def test_log_probabilities(server):
    """Of a chat: those of the tokens, and of the most likely ones, best first: at temperature 0 the token itself."""
    expected = solo(server.target, HELLO, 12)
    asked = {"messages": HELLO, "max_completion_tokens": 12, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    whole = (await server.post(CHAT, **asked))["choices"][0]["logprobs"]["content"]
    streamed = [entry for e in await server.stream(CHAT, **asked) for entry in e["choices"][0]["logprobs"]["content"]]
    assert streamed == whole
    assert [entry["logprob"] for entry in whole] == pytest.approx(expected.logprobs, abs=1e-4)
    assert [entry["token"] for entry in whole] == [server.target.tokenizer.decode([i]) for i in expected.ids]
    assert all(bytes(entry["bytes"]).decode(errors="replace") == entry["token"] for entry in whole)
    special = server.target.tokenizer.all_special_ids
    shown = [entry["bytes"] for entry, token in zip(whole, expected.ids, strict=True) if token not in special]
    assert bytes(byte for part in shown for byte in part).decode(errors="replace") == expected.text
    for entry in whole:
        seen = entry["top_logprobs"]
        assert len(seen) == 3
        assert seen[0] == {name: entry[name] for name in ("token", "logprob", "bytes")}
        assert [x["logprob"] for x in seen] == sorted((x["logprob"] for x in seen), reverse=True)


@served()
async def test_log_probabilities_of_completions(server):
    """A drawn token comes last, unless it is among the most likely ones."""
    drawn = {"prompt": "The", "max_tokens": 9, "temperature": 1.5, "seed": 3, "logprobs": 2}
    (choice,) = (await server.post(TEXT, **drawn))["choices"]
    seen = choice["logprobs"]
    assert seen["text_offset"] == sorted(seen["text_offset"])
    for token, offset in zip(seen["tokens"], seen["text_offset"], strict=True):
        assert token.startswith("bytes:") or choice["text"][offset:].startswith(token)
    for token, logprob, likely in zip(seen["tokens"], seen["token_logprobs"], seen["top_logprobs"], strict=True):
        assert likely[token] >= logprob
        assert len(likely) <= 3
        assert max(likely.values()) == next(iter(likely.values()))
    usage = {"stream_options": {"continuous_usage_stats": True}}
    streamed = [e["choices"][0]["logprobs"] for e in await server.stream(TEXT, **drawn, **usage)]
    for name in ("top_logprobs", "text_offset"):
        assert [x for part in streamed for x in part[name]] == seen[name]


async def one_of_many(server, number: int, gate: asyncio.Semaphore) -> dict:
    """Send request `number`, compare its text, and return its usage. Every tenth is refused."""
    how = {"temperature": (0, 0.9)[number % 2], "max_tokens": 3 + number % 9, "seed": number}
    body = {"prompt": "The quick brown fox"[: 3 + number % 16], "ignore_eos": number % 3 == 0} | how
    if number % 10 == 9:
        bad = ({"max_tokens": 0}, {"prompt": "x" * 500})[number % 4 // 2]
        assert (await server.client.post(TEXT, json=body | bad)).status_code == 400
        return {"prompt_tokens": 0, "completion_tokens": 0}
    stop = ["e", "o "] if number % 4 == 1 else []
    eos = frozenset() if body["ignore_eos"] else None
    rest = {"seed": (number, 0), "stop": stop, "eos": eos, "temperature": how["temperature"]}
    expected = solo(server.target, body["prompt"], how["max_tokens"], **rest)
    async with gate:
        if number % 2:
            events = await server.stream(TEXT, **body, stop=stop or None, stream_options={"include_usage": True})
            text, usage = content(events), events[-1]["usage"]
        else:
            whole = await server.post(TEXT, **body, stop=stop)
            text, usage = whole["choices"][0]["text"], whole["usage"]
    assert text == expected.text
    assert usage["completion_tokens"] == len(expected.ids)
    return usage


@served()
async def test_many_at_once_and_the_counters_add_up(server):
    """50 requests, 30 at once, for 4 rows; malformed ones and ones that are too long among them."""
    gate = asyncio.Semaphore(30)
    used = await asyncio.gather(*(one_of_many(server, number, gate) for number in range(50)))
    seen = await server.counters()
    assert seen["vllm:generation_tokens_total"] == sum(usage["completion_tokens"] for usage in used)
    assert seen["vllm:prompt_tokens_total"] == sum(usage["prompt_tokens"] for usage in used)
    assert sum(seen[f"vllm:request_success_total {reason}"] for reason in ("stop", "length")) == 45
    assert seen["specdec:requests_refused_total 400"] == 5
    assert seen["vllm:time_to_first_token_seconds_count"] == seen["vllm:e2e_request_latency_seconds_bucket +Inf"] == 45
    assert seen["vllm:num_requests_running"] == seen["vllm:num_requests_waiting"] == 0
    assert seen["specdec:tau"] == seen["specdec:round_tokens_total"] / seen["specdec:sequence_rounds_total"] > 1


@pytest.mark.parametrize("stream", [True, False])
@served(rows=1)
async def test_a_client_that_vanishes(server, stream):
    """While it is decoded, and while it waits for the only row."""
    scheduler, hold = server.scheduler, threading.Event()
    step = scheduler.engine.step
    scheduler.engine.step = lambda: (step(), hold.wait())[0]  # so that no text ends before they vanish
    body = {"prompt": "The", "max_tokens": 90, "ignore_eos": True, "stream": stream, "temperature": 0}
    data = json.dumps(body).encode()
    async with asyncio.timeout(300), listening(server.app, lifespan="off") as port:
        writers = [(await asyncio.open_connection("127.0.0.1", port))[1] for _ in range(2)]
        for writer in writers:
            writer.write(f"POST {TEXT} HTTP/1.1\r\nhost: a\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
        try:
            while not (scheduler.running and scheduler.queue):
                await asyncio.sleep(0.001)
            jobs = [*scheduler.running.values(), *scheduler.queue]
            for writer in writers:
                writer.close()
            while not all(job.unwanted for job in jobs):
                await asyncio.sleep(0.001)
        finally:
            hold.set()
        while scheduler.running or scheduler.queue:
            await asyncio.sleep(0.001)
    assert (await server.counters())["vllm:request_success_total abort"] == 2
    again = await server.post(TEXT, prompt="The", max_tokens=20, temperature=0)
    assert again["choices"][0]["text"] == solo(server.target, "The", 20).text


# What a value of a wrong type gets is in test_hostile.py.
WRONG = [
    (CHAT, {}, "messages", "messages is missing"),
    (CHAT, {"messages": []}, "messages", "messages is empty"),
    (CHAT, {"messages": HELLO, "max_completion_tokens": 1000}, "max_completion_tokens", "but a text may have 100 here"),
    (CHAT, {"messages": HELLO, "max_tokens": 1000}, "max_tokens", "but a text may have 100 here"),
    (CHAT, {"messages": HELLO * 20}, "messages", "but a text may have 100 here"),
    (CHAT, {"messages": HELLO, "top_logprobs": 3}, "top_logprobs", "needs logprobs to be true"),
    (CHAT, {"messages": [{"role": "user", "\ud800": 1}]}, "messages[0].\ufffd\ufffd\ufffd", "which is not built"),
    (TEXT, {"prompt": ""}, "prompt", "the prompt is empty"),
    (TEXT, {"prompt": [10**9]}, "prompt", "the prompt holds token 1000000000"),
    (TEXT, {"prompt": [5, -1]}, "prompt", "the prompt holds token -1, but the target's vocabulary has ids 0 to"),
    (TEXT, {"prompt": [1] * 100}, "prompt", "but a text may have 100 here"),
    (TEXT, {"prompt": "x", "temperature": "hot"}, "temperature", "must be a valid number, got 'hot'"),
    (TEXT, {"prompt": "x", "top_p": 0}, "top_p", "must be greater than 0, got 0"),
    (TEXT, {"prompt": "x", "n": 17}, "n", "16 texts at most, got n 17"),
    (TEXT, {"prompt": ["x"] * 17}, "prompt", "got 17 prompts with n 1"),
    (TEXT, {"prompt": "x", "stop": ["a", ""]}, "stop[1]", "at least one character"),
    (TEXT, {"prompt": "x", "stop": ["a"] * 17}, "stop", "16 strings at most"),
    (TEXT, {"prompt": "x", "logprobs": 21}, "logprobs", "less than or equal to 20, got 21"),
    (TEXT, {"prompt": "x", "min_tokens": 4}, "min_tokens", "is not built"),
    (TEXT, {"prompt": "x", "temprature": 1}, "temprature", "there is no parameter 'temprature'"),
    (TEXT, {"prompt": "x", "\ud800": 1}, "\ufffd" * 3, "there is no parameter"),
    (TEXT, {"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
    ("/tokenize", {"text": "x"}, "prompt", "give a text as prompt"),
    ("/tokenize", {"prompt": "x", "messages": HELLO}, "prompt", "but not both"),
    ("/tokenize", {"prompt": "x", "return_token_strs": True}, "return_token_strs", "is not built"),
    ("/detokenize", {}, "tokens", "tokens is missing"),
    ("/detokenize", {"tokens": [10**9]}, "tokens", "a list of ids from 0"),
]


@served(reporting={"body_bytes": 4000}, queue=1)
async def test_errors_have_openais_form(server):
    refused = server.refused
    for path, body, param, message in WRONG:
        await refused(400, message, param, path=path, content=json.dumps(body).encode())
    await refused(404, "no model 'gpt'", "model", "model_not_found", json={"model": "gpt", "prompt": "x"})
    await refused(400, "not valid JSON", content=b"{")
    await refused(400, "must be a JSON object", content=b"[1]")
    await refused(400, "must be a JSON object", content=b"[1]", path="/tokenize")
    await refused(413, "more than 4000 bytes", code="request_too_large", content=b" " * 5000)
    await refused(404, "GET /nothing is not served", path="/nothing", method="GET")
    await refused(405, "GET /v1/completions is not served", method="GET")
    assert (await server.client.get(TEXT)).headers["allow"] == "POST"
    await refused(429, "try again later", code="queue_full", json={"prompt": "x", "n": 6})
    assert (await server.counters())["specdec:requests_refused_total 429"] == 1
    server.scheduler.close()
    await refused(503, "the server stops", json={"prompt": "x"})
    assert (await server.client.get("/health")).status_code == 503


@served()
async def test_what_is_reported_of_the_model(server):
    (model,) = (await server.client.get("/v1/models")).json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 100)
    assert (await server.client.get("/v1/models/tiny")).json() == model
    await server.refused(404, "no model 'a/b'", "model", "model_not_found", path="/v1/models/a%2Fb", method="GET")
    seen = await server.post("/tokenize", prompt="Ein Café")
    assert seen["tokens"] == server.target.tokenizer("Ein Café")["input_ids"]
    assert seen["count"] == len(seen["tokens"])
    assert await server.post("/detokenize", tokens=seen["tokens"]) == {"prompt": "Ein Café"}
    chat = await server.post("/tokenize", messages=HELLO)
    answer = await server.post(CHAT, messages=HELLO, max_tokens=1)
    assert answer["usage"]["prompt_tokens"] == chat["count"]


KINDS = {
    "gauge": "vllm:num_requests_running vllm:num_requests_waiting vllm:kv_cache_usage_perc specdec:tau",
    "counter": "vllm:prompt_tokens vllm:prefix_cache_queries vllm:prefix_cache_hits vllm:generation_tokens "
    "vllm:request_success{finished_reason} vllm:spec_decode_num_drafts vllm:spec_decode_num_draft_tokens "
    "vllm:spec_decode_num_accepted_tokens vllm:spec_decode_num_accepted_tokens_per_pos{position} specdec:rounds "
    "specdec:sequence_rounds specdec:round_tokens specdec:requests_refused{status}",
    "histogram": "vllm:time_to_first_token_seconds vllm:inter_token_latency_seconds vllm:request_queue_time_seconds "
    "vllm:e2e_request_latency_seconds",
}
PARTS = {"gauge": {""}, "counter": {"_total"}, "histogram": {"_bucket", "_sum", "_count"}}


@served()
async def test_metrics_are_prometheus_text(server):
    """All families are there with their names and labels, and no other series."""
    assert (await server.client.get("/none")).status_code == 404
    answer = await server.client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = {kind: set() for kind in KINDS}
    for family in text_string_to_metric_families(answer.text):
        assert {series.name.removeprefix(family.name) for series in family.samples} == PARTS[family.type]
        assert family.documentation
        (labels,) = {frozenset(series.labels) - {"model_name", "engine", "le"} for series in family.samples}
        found[family.type].add(family.name + "".join(f"{{{label}}}" for label in labels))
    assert found == {kind: set(names.split()) for kind, names in KINDS.items()}
