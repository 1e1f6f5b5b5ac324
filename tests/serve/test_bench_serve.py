"""`specdec lab bench serve` against our own server, and against answers that are not valid."""

import json
import time

import pytest
from helpers import main_of, refused

pytest.importorskip("fastapi")

import asyncio

import httpx2
from clients import serve

from specdec.cli.commands import parse
from specdec.lab.bench.bench_serve import Answer, Asked, ask, figures_of, measure, print_loads, spread

main = main_of("lab bench serve")

PROMPTS = ["one", "another one", "x"] * 4


def run(pair, *words: str, **how) -> dict:
    args, found = parse("lab bench serve", ["--prompts", "none", "--max-new-tokens", "9", *words]), []

    async def use(server):
        found.append(await measure(args, PROMPTS, server.client._transport))

    serve(pair, use, **how)
    return found[0]


@pytest.mark.parametrize("words", [["--concurrency", "1,3"], ["--rate", "500", "--completions", "--temperature", "1"]])
def test_our_server_is_measured(pair, words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    found = run(pair, *words, "--ignore-eos")
    for point in found["loads"]:
        assert (point["requests"], point["valid"], point["wrong"]) == (12, 12, [])
        assert point["output_tokens"] == 12 * 9
        assert point["tokens_per_second"] == pytest.approx(108 / point["seconds"])
        assert point["acceptance_length"] >= 1
        assert all(point[name]["p99"] >= point[name]["median"] > 0 for name in ("ttft_ms", "e2e_ms"))
    assert [point["concurrency"] for point in found["loads"]] == ([1, 3] if "--rate" not in words else [None])
    print_loads(found)
    assert "12 of 12" in capsys.readouterr().out


def test_a_full_queue_makes_answers_invalid(pair):
    point = run(pair, "--concurrency", "12", "--warm-up", "0", rows=1, queue=1)["loads"][0]
    assert point["valid"] < point["requests"] == 12
    assert "status 429" in point["wrong"][0]


def events(*chunks: dict, end: bool = True) -> str:
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + (": comment\n\ndata: [DONE]\n\n" * end)


CHUNK = {"choices": [{"delta": {"content": "a"}, "finish_reason": None}]}
LAST = {"choices": [{"delta": {}, "finish_reason": "length"}]}
USAGE = {"choices": [], "usage": {"completion_tokens": 5, "prompt_tokens": 2}}
STREAMS = {
    "": events(CHUNK, CHUNK, LAST, USAGE),
    "no end": events(CHUNK, LAST, USAGE, end=False),
    "no usage": events(CHUNK, LAST),
    "no finish_reason": events(CHUNK, USAGE),
    "5 tokens came, and 4": events(CHUNK, LAST, USAGE),
    "the server stops": events(CHUNK, {"error": {"message": "the server stops"}}),
    "JSONDecodeError": "data: {\n\n",
}


@pytest.mark.parametrize("wrong", STREAMS)
def test_what_makes_an_answer_valid(wrong):
    transport = httpx2.MockTransport(lambda request: httpx2.Response(200, text=STREAMS[wrong]))

    async def one():
        async with httpx2.AsyncClient(transport=transport, base_url="http://x") as client:
            return await ask(client, Asked("m", 4 if "4" in wrong else 5), "hello")

    answer = asyncio.run(one())
    assert wrong in answer.wrong if wrong else answer.wrong == ""
    assert answer.text == ("aa" if not wrong else answer.text)


def test_lengths_vary_alike_for_all_servers():
    lengths = [Asked("m", 64, range_ratio=0.5).of(number).max_tokens for number in range(200)]
    assert lengths == [Asked("other", 64, range_ratio=0.5).of(number).max_tokens for number in range(200)]
    assert (min(lengths) in (32, 33), max(lengths) in (95, 96)) == (True, True)
    assert sum(lengths) / 200 == pytest.approx(64, rel=0.1)
    assert Asked("m", 64).of(3).max_tokens == 64
    assert Asked("m", 1, range_ratio=0.9).of(3).max_tokens >= 1


def test_figures_by_the_book():
    answers = [Answer(time.perf_counter(), [0.1, 0.2, 0.5], 0.6, 4, 9, "", "stop"), Answer(0.0, wrong="it is")]
    found = figures_of(answers, 2.0)
    assert (found["valid"], found["requests"], found["tokens_per_second"]) == (1, 2, 4.5)
    assert found["ttft_ms"]["mean"] == pytest.approx(100)
    assert found["itl_ms"] == pytest.approx(spread([100, 300]))
    assert found["tpot_ms"]["median"] == pytest.approx(400 / 8)
    assert found["interactivity"] == pytest.approx(8 / 0.4)


def test_wrong_settings_are_reported(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("hello\n")
    for words, message in (
        (["--range-ratio", "1"], "below 1"),
        (["--server", "http://127.0.0.1:1"], "does not tell its models"),
    ):
        assert message in refused(main, "--prompts", file, *words)
