"""What `vllm bench serve` 0.32 and `guidellm` 0.8.1 send is taken, and what they look for in answers is there."""

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx2")

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
