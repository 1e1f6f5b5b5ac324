"""A chat of several turns: what it says is what it says alone, and its earlier turns are read once."""

import pytest

pytest.importorskip("fastapi")

from clients import CHAT, TEXT, serve, solo

ASKED = ["Hello there, how are you today? " * 2, "Why?", "Go on."]


def chat(turns: int) -> list[dict]:
    """So many questions, with answers between them."""
    said = []
    for text in ASKED[:turns]:
        said += [{"role": "user", "content": text}, {"role": "assistant", "content": "So."}]
    return said[:-1]


def test_turns_are_read_once(pair):
    async def use(server):
        before, cached = 0, []
        for turns in (1, 2, 3, 3):
            expected = solo(pair[0], chat(turns), 12, temperature=0)
            whole = await server.post(CHAT, messages=chat(turns), max_tokens=12, temperature=0)
            assert whole["choices"][0]["message"]["content"] == expected.text
            used = whole["usage"]
            cached.append(used["prompt_tokens_details"]["cached_tokens"])
            assert cached[-1] < used["prompt_tokens"]
            assert cached[-1] >= before - 1  # what the turn before had, but for the end of a prompt
            before = used["prompt_tokens"]
        assert cached[0] == 0
        assert cached[-1] == before - 1
        told = await server.counters()
        assert told["vllm:prefix_cache_hits_total"] == sum(cached)
        assert told["vllm:prefix_cache_queries_total"] == told["vllm:prompt_tokens_total"]

    serve(pair, use, prefixes=1 << 24, told={"prompt_details": True})


def test_prompts_are_counted_once_for_all_their_texts(pair):
    async def use(server):
        prompts = ["The quick brown fox jumps over the lazy dog. " * 3, "How many of them are there?"]
        for cached in (0, None):
            whole = await server.post(TEXT, prompt=prompts, n=2, max_tokens=3, temperature=0)
            used = whole["usage"]["prompt_tokens"]
            longest = len(pair[0].tokenizer(prompts[0])["input_ids"])
            expected = longest - 1 if cached is None else cached
            assert longest > 33 > used - longest  # of tokens; the second prompt is too short to be kept
            assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": expected}

    serve(pair, use, prefixes=1 << 24, told={"prompt_details": True})


def test_nothing_is_kept_or_told_unless_it_is_asked_for(pair):
    async def use(server):
        for _ in range(2):
            whole = await server.post(CHAT, messages=chat(2), max_tokens=3, temperature=0)
            assert "prompt_tokens_details" not in whole["usage"]
        told = await server.counters()
        assert told["vllm:prefix_cache_queries_total"] == told["vllm:prefix_cache_hits_total"] == 0

    serve(pair, use)
