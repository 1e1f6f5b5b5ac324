"""What a server reports in addition to the text, and what requests and flags change: acceptance, speculation, cached
prompts, time limits."""

import asyncio
import re

import pytest
from clients import CHAT, HELLO, TEXT, serve, served, solo

from specdec.engine.adaptive import Fixed
from specdec.trees import DynamicTree
from specdec.tuning.costs import Costs, Point
from specdec.tuning.engines import kinds_of, make_policy


@served(reporting={"acceptance": "detailed"})
async def test_acceptance_is_reported_as_vllm_does(server):
    """The counts of a response add up to its usage and to /metrics."""
    body = {"messages": HELLO, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    whole = await server.post(CHAT, **body)
    reporting = whole["metrics"]["speculative_decoding"]
    counters = await server.counters()
    steps, accepted, drafted = (reporting[f"num_{n}"] for n in ("spec_steps", "accepted_draft_tokens", "draft_tokens"))
    assert (steps, drafted) == (len(reporting["per_step_accepted"]), sum(reporting["per_step_drafted"]))
    assert reporting["per_step_drafted"] == [8] * steps
    assert reporting["mean_acceptance_length"] == 1 + accepted / steps
    assert reporting["draft_acceptance_rate"] == accepted / drafted
    assert sum(j * n for j, n in enumerate(reporting["acceptance_histogram"])) == accepted
    assert reporting["acceptance_histogram_by_draft_length"] == {"8": reporting["acceptance_histogram"]}
    assert reporting["num_spec_tokens"] == 8
    assert counters["vllm:spec_decode_num_drafts_total"] == steps
    assert counters["vllm:spec_decode_num_accepted_tokens_total"] == accepted > 0
    assert 1 + steps + accepted == whole["usage"]["completion_tokens"]
    events = await server.stream(CHAT, **body, stream_options={"include_usage": True})
    assert events[-1]["metrics"]["speculative_decoding"] == reporting
    assert not any("metrics" in event for event in events[:-1])
    assert "metrics" not in await server.post(CHAT, **body, n=2)


@served(max_seconds=50)
async def test_a_request_that_takes_too_long(server, monkeypatch):
    body = {"prompt": "x", "max_tokens": 60, "ignore_eos": True}
    await server.post(TEXT, **body)
    real = server.scheduler._take_leaving

    def late():
        for job in server.scheduler.running.values():
            job.arrived -= 100
        return real()

    with monkeypatch.context() as changed:
        changed.setattr(server.scheduler, "_take_leaving", late)
        answer = await server.client.post(TEXT, json=body)
        assert answer.status_code == 504
        for error in (answer.json(), (await server.stream(TEXT, **body))[-1]):
            assert error["error"]["message"] == "the request took more than 50 seconds"
    await server.post(TEXT, **body)


@pytest.mark.parametrize("name", ["survival:told", "ema", "off"])
def test_an_adaptive_server_says_what_the_target_says(pair, name):
    """And its counters add up to those of responses."""
    kinds = kinds_of(DynamicTree(3, 3, 9))
    costs = Costs(Point(k, b, 1.0, 0.1 * k.levels, 1.0 + 0.02 * b * k.nodes) for k in kinds for b in (1, 4))
    policy = Fixed(0) if name == "off" else make_policy(name, lambda: costs, kinds, [0.5] * 3)

    async def use(server):
        bodies = [{"prompt": f"{i}", "max_tokens": 12 + i, "temperature": i % 2, "seed": i} for i in range(9)]
        answers = await asyncio.gather(*(server.post(TEXT, **body) for body in bodies))
        for i, answer in enumerate(answers):
            assert answer["choices"][0]["text"] == solo(pair[0], f"{i}", 12 + i, seed=(i, 0), temperature=i % 2).text
        counters = await server.counters()
        reporting = [answer["metrics"]["speculative_decoding"] for answer in answers]
        for counter, field in (("drafts", "spec_steps"), ("draft_tokens", "draft_tokens")):
            assert counters[f"vllm:spec_decode_num_{counter}_total"] == sum(t[f"num_{field}"] for t in reporting)
        assert (sum(t["num_draft_tokens"] for t in reporting) == 0) == (name == "off")

    serve(pair, use, reporting={"acceptance": "summary"}, adaptive=policy)


@served(reporting={"acceptance": "detailed"})
async def test_none_fewer_levels_and_all_of_them_side_by_side(server):
    asked = [{"off": True}, {"steps": 0}, {"steps": 1}, {"steps": 3, "topk": 3}, {}, {"num_draft_tokens": 9}]
    body = {"messages": HELLO, "max_tokens": 40, "temperature": 0.8, "seed": 3, "ignore_eos": True}
    answers = await asyncio.gather(*(server.post(CHAT, **body, speculative=one) for one in asked))
    text = solo(server.target, HELLO, 40, seed=(3, 0), temperature=0.8, eos=frozenset()).text
    reporting = [answer["metrics"]["speculative_decoding"] for answer in answers]
    assert [answer["choices"][0]["message"]["content"] for answer in answers] == [text] * 6
    assert [one["num_spec_steps"] for one in reporting[:2]] == [0, 0]
    assert set(reporting[2]["per_step_drafted"]) <= {1, 2, 3}  # of the nine nodes those of the first level
    assert set(reporting[2]["per_step_accepted"]) == {0, 1}
    for one in reporting[3:]:
        assert set(one["per_step_drafted"]) == {8}
        assert max(one["per_step_accepted"]) > 1
    counters = await server.counters()
    assert counters["vllm:spec_decode_num_drafts_total"] == sum(one["num_spec_steps"] for one in reporting)
    assert counters["vllm:spec_decode_num_draft_tokens_total"] == sum(one["num_draft_tokens"] for one in reporting)


REFUSED = [
    ({"draft": "demo/mtp"}, "speculative.draft is 'demo/mtp', but this server drafts with 'Eagle3'"),
    ({"tree": "4/5/16"}, "speculative.tree is '4/5/16', which this server does not have: its tree is 3/3/9"),
    ({"topk": 1}, "speculative.topk is 1, which this server does not have"),
    ({"num_draft_tokens": 4}, "speculative.num_draft_tokens is 4, which"),
    ({"steps": 4}, "speculative.steps is 4, but this server's tree has 3 levels"),
    ({"off": True, "steps": 1}, "speculative.off contradicts speculative.steps"),
]


@served()
async def test_what_the_server_does_not_have_is_named(server):
    for asked, message in REFUSED:
        body = {"prompt": "x", "speculative": asked}
        await server.refused(400, f"^{re.escape(message)}", message.split()[0], json=body)


TURNS = ["Hello there, how are you today? " * 2, "Why?", "Go on."]


def chat(turns: int) -> list[dict]:
    """So many questions, with answers between them."""
    said = []
    for text in TURNS[:turns]:
        said += [{"role": "user", "content": text}, {"role": "assistant", "content": "So."}]
    return said[:-1]


@served(prefixes=1 << 24, reporting={"prompt_details": True})
async def test_turns_are_read_once(server):
    before, cached = 0, []
    for turns in (1, 2, 3, 3):
        expected = solo(server.target, chat(turns), 12, temperature=0)
        whole = await server.post(CHAT, messages=chat(turns), max_tokens=12, temperature=0)
        assert whole["choices"][0]["message"]["content"] == expected.text
        used = whole["usage"]
        cached.append(used["prompt_tokens_details"]["cached_tokens"])
        assert cached[-1] < used["prompt_tokens"]
        assert cached[-1] >= before - 1  # what the turn before had, but for the end of a prompt
        before = used["prompt_tokens"]
    assert cached[0] == 0
    assert cached[-1] == before - 1
    reporting = await server.counters()
    assert reporting["vllm:prefix_cache_hits_total"] == sum(cached)
    assert reporting["vllm:prefix_cache_queries_total"] == reporting["vllm:prompt_tokens_total"]


@served(prefixes=1 << 24, reporting={"prompt_details": True})
async def test_prompts_are_counted_once_for_all_their_texts(server):
    prompts = ["The quick brown fox jumps over the lazy dog. " * 3, "How many of them are there?"]
    longest = len(server.target.tokenizer(prompts[0])["input_ids"])
    for cached in (0, longest - 1):
        usage = (await server.post(TEXT, prompt=prompts, n=2, max_tokens=3, temperature=0))["usage"]
        assert longest > 33 > usage["prompt_tokens"] - longest  # tokens: the second prompt is too short to be cached
        assert usage["prompt_tokens_details"] == {"cached_tokens": cached}


@served()
async def test_nothing_is_cached_or_reported_unless_it_is_asked_for(server):
    for _ in range(2):
        whole = await server.post(CHAT, messages=chat(2), max_tokens=3, temperature=0)
        assert "prompt_tokens_details" not in whole["usage"]
    reporting = await server.counters()
    assert reporting["vllm:prefix_cache_queries_total"] == reporting["vllm:prefix_cache_hits_total"] == 0
