"""What `vllm bench serve` 0.32 and `guidellm` 0.8.1 send is taken, and what they look for in answers is there.

`scripts/serve_clients.py` runs the clients themselves, where they are installed."""

import re
from argparse import Namespace

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx2")

import serve_clients
from clients import CHAT, TEXT, serve

PARTS = [{"role": "user", "content": [{"type": "text", "text": "What is 12 + 30?"}]}]
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
VLLM_CHAT = {"model": "tiny", "messages": PARTS, "max_completion_tokens": 24, **USAGE, "ignore_eos": True}
VLLM_TEXT = {
    "model": "tiny",
    "prompt": [5, 6, 7],
    "repetition_penalty": 1.0,
    "max_tokens": 24,
    "logprobs": None,
    **USAGE,
}
GUIDELLM = {
    "model": "tiny",
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "max_completion_tokens": 24,
    "ignore_eos": True,
    "temperature": 0,
    "messages": PARTS,
}


def vllm_reads(text: str) -> dict[str, int]:
    """`fetch_spec_decode_metrics` of vLLM's client: which series add up to which of its fields."""
    found = {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0, "by_position": 0}
    for line in text.split("\n"):
        name, value = line.split("{")[0], line.split()[-1:]
        if line.startswith("vllm:spec_decode") and name.endswith("_total"):
            kinds = {"num_drafts": "drafts", "num_draft_tokens": "draft_tokens", "per_pos": "by_position"}
            found[next((f for part, f in kinds.items() if part in name), "accepted_tokens")] += int(float(value[0]))
    return found


def test_bodies_of_other_clients_and_the_fields_they_read(pair):
    async def use(server):
        sums = dict.fromkeys(("drafts", "draft_tokens", "accepted_tokens"), 0)
        for path, body in ((CHAT, VLLM_CHAT | {"temperature": 0}), (TEXT, VLLM_TEXT), (CHAT, GUIDELLM)):
            *_, last = await server.stream(path, **body)
            assert last["choices"] == []
            assert last["usage"]["completion_tokens"] == 24 or path == TEXT
            told = last["metrics"]["speculative_decoding"]
            sums["drafts"] += told["num_spec_steps"]
            sums["draft_tokens"] += told["num_draft_tokens"]
            sums["accepted_tokens"] += told["num_accepted_draft_tokens"]
        counted = vllm_reads((await server.client.get("/metrics")).text)
        assert counted.pop("by_position") == counted["accepted_tokens"]
        assert counted == sums
        assert sums["drafts"] > 0

    serve(pair, use, told={"acceptance": "summary"})


@pytest.mark.parametrize("lie", [0, 1])
def test_a_client_that_counts_otherwise_than_the_server_is_found(monkeypatch, lie):
    before = {"drafts": 3, "draft_tokens": 9, "accepted_tokens": 2, "generation_tokens": 7}
    after = {"drafts": 13, "draft_tokens": 39, "accepted_tokens": 14, "generation_tokens": 30}
    answers = iter((before, after))
    monkeypatch.setattr(serve_clients, "counters", lambda url: next(answers))

    def told(*_) -> dict:
        sums = {"drafts": 10, "draft_tokens": 30, "accepted_tokens": 12 + lie}
        return {"version": "x 1", "requests": 2, "output_tokens": 23} | sums | serve_clients.ratios(sums)

    found = serve_clients.compared("x", told, Namespace(), "", ["a", "b"], None)
    assert found["differs"] == (["accepted_tokens", "acceptance_length", "acceptance_rate"] if lie else [])


def test_counters_of_the_script(monkeypatch, pair):
    async def use(server):
        await server.stream(CHAT, **GUIDELLM)
        text = (await server.client.get("/metrics")).text
        monkeypatch.setattr(serve_clients, "urlopen", lambda _: Opened(text))
        found = serve_clients.counters("")
        assert found.pop("generation_tokens") == 24
        assert found == {k: v for k, v in vllm_reads(text).items() if k != "by_position"}

    serve(pair, use)


class Opened:
    def __init__(self, text: str):
        self.read = re.sub("^#.*\n", "", text, flags=re.MULTILINE).encode

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass
