"""What a request says of its own speculation: its text stays, and what the server does not have is named."""

import asyncio
import re

import pytest

pytest.importorskip("fastapi")

from clients import CHAT, HELLO, TEXT, serve, solo


def test_none_fewer_levels_and_all_of_them_side_by_side(pair):
    async def use(server):
        asked = [{"off": True}, {"steps": 0}, {"steps": 1}, {"steps": 3, "topk": 3}, {}, {"num_draft_tokens": 9}]
        body = {"messages": HELLO, "max_tokens": 40, "temperature": 0.8, "seed": 3, "ignore_eos": True}
        answers = await asyncio.gather(*(server.post(CHAT, **body, speculative=one) for one in asked))
        text = solo(pair[0], HELLO, 40, seed=(3, 0), temperature=0.8, eos=frozenset()).text
        told = [answer["metrics"]["speculative_decoding"] for answer in answers]
        assert [answer["choices"][0]["message"]["content"] for answer in answers] == [text] * 6
        assert [one["num_spec_steps"] for one in told[:2]] == [0, 0]
        assert set(told[2]["per_step_drafted"]) <= {1, 2, 3}  # of the nine nodes those of the first level
        assert set(told[2]["per_step_accepted"]) == {0, 1}
        for one in told[3:]:
            assert set(one["per_step_drafted"]) == {8}
            assert max(one["per_step_accepted"]) > 1
        counters = await server.counters()
        assert counters["vllm:spec_decode_num_drafts_total"] == sum(one["num_spec_steps"] for one in told)
        assert counters["vllm:spec_decode_num_draft_tokens_total"] == sum(one["num_draft_tokens"] for one in told)

    serve(pair, use, told={"acceptance": "detailed"})


REFUSED = [
    ({"draft": "demo/mtp"}, "speculative.draft is 'demo/mtp', but this server drafts with 'Eagle3'"),
    ({"tree": "4/5/16"}, "speculative.tree is '4/5/16', which this server does not have: its tree is 3/3/9"),
    ({"topk": 1}, "speculative.topk is 1, which this server does not have"),
    ({"num_draft_tokens": 4}, "speculative.num_draft_tokens is 4, which"),
    ({"steps": 4}, "speculative.steps is 4, but this server's tree has 3 levels"),
    ({"steps": -1}, "speculative.steps must be at least 0, got -1"),
    ({"off": 1}, "speculative.off must be true or false, got 1"),
    ({"off": True, "steps": 1}, "speculative.off contradicts speculative.steps"),
    ({"depth": 1}, "speculative has no 'depth'; it has off, steps"),
    ([], "speculative must be a mapping"),
]


def test_what_the_server_does_not_have_is_named(pair):
    async def use(server):
        for asked, message in REFUSED:
            answer = await server.client.post(TEXT, json={"prompt": "x", "speculative": asked})
            assert answer.status_code == 400, asked
            error = answer.json()["error"]
            assert re.match(re.escape(message), error["message"]), error
            assert error["param"] == "speculative"

    serve(pair, use)
