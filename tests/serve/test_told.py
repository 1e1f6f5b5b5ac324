"""What a server tells beside the text: acceptance, events of so many tokens, traces, and that time is over."""

import asyncio
import json

import pytest
from helpers import run_here

pytest.importorskip("fastapi")

from clients import CHAT, HELLO, TEXT, serve, solo

from specdec.adaptive import Curve, Fixed
from specdec.calibrate import assembled, sizes_of
from specdec.engine.recorder import Recorder
from specdec.engine.trace_files import read_trace, write_trace
from specdec.lab.traces.metrics_command import main as metrics_main
from specdec.serve.scheduler import Scheduler
from specdec.trees import DynamicTree


def test_acceptance_is_told_as_vllm_does(pair):
    """What a response tells of its steps adds up to its usage and to /metrics."""

    async def use(server):
        body = {"messages": HELLO, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        whole = await server.post(CHAT, **body)
        told = whole["metrics"]["speculative_decoding"]
        counters = await server.counters()
        steps, accepted, drafted = (told[f"num_{n}"] for n in ("spec_steps", "accepted_draft_tokens", "draft_tokens"))
        assert (steps, drafted) == (len(told["per_step_accepted"]), sum(told["per_step_drafted"]))
        assert told["per_step_drafted"] == [8] * steps
        assert told["mean_acceptance_length"] == 1 + accepted / steps
        assert told["draft_acceptance_rate"] == accepted / drafted
        assert sum(j * n for j, n in enumerate(told["acceptance_histogram"])) == accepted
        assert told["acceptance_histogram_by_draft_length"] == {"8": told["acceptance_histogram"]}
        assert told["num_spec_tokens"] == 8
        assert counters["vllm:spec_decode_num_drafts_total"] == steps
        assert counters["vllm:spec_decode_num_accepted_tokens_total"] == accepted > 0
        assert 1 + steps + accepted == whole["usage"]["completion_tokens"]
        events = await server.stream(CHAT, **body, stream_options={"include_usage": True})
        assert events[-1]["metrics"]["speculative_decoding"] == told
        assert not any("metrics" in event for event in events[:-1])
        assert "metrics" not in await server.post(CHAT, **body, n=2)

    serve(pair, use, told={"acceptance": "detailed"})


@pytest.mark.parametrize("interval", [1, 3])
def test_events_of_so_many_tokens(pair, interval):
    async def use(server):
        body = {"prompt": "The quick", "max_tokens": 31, "temperature": 1.2, "seed": 4, "ignore_eos": True}
        expected = solo(pair[0], "The quick", 31, seed=(4, 0), temperature=1.2, eos=frozenset())
        events = await server.stream(TEXT, **body, logprobs=0)
        choices = [event["choices"][0] for event in events]
        counts = [len(choice["logprobs"]["tokens"]) for choice in choices]
        assert counts == [interval] * (31 // interval) + [31 % interval] * (31 % interval > 0)
        assert "".join(choice["text"] for choice in choices) == expected.text
        assert [x for choice in choices for x in choice["logprobs"]["token_logprobs"]] == pytest.approx(
            expected.logprobs, abs=1e-4
        )
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
        assert (await server.post(TEXT, **body))["choices"][0]["text"] == expected.text

    serve(pair, use, told={"stream_interval": interval})


def test_a_request_that_takes_too_long(pair, monkeypatch):
    late = []
    real = Scheduler._take_leaving

    def take(self):
        for job in self.running.values() if late else ():
            job.arrived -= 100
        return real(self)

    monkeypatch.setattr(Scheduler, "_take_leaving", take)

    async def use(server):
        body = {"prompt": "x", "max_tokens": 60, "ignore_eos": True}
        await server.post(TEXT, **body)
        late.append(True)
        answer = await server.client.post(TEXT, json=body)
        assert answer.status_code == 504
        assert answer.json()["error"]["message"] == "the request took more than 50 seconds"
        events = await server.stream(TEXT, **body)
        assert events[-1]["error"]["message"] == "the request took more than 50 seconds"
        late.clear()
        await server.post(TEXT, **body)

    serve(pair, use, max_seconds=50)


def test_a_trace_of_what_was_served(pair, tmp_path):
    recorder = Recorder({"flags": {}})

    async def use(server):
        bodies = [{"prompt": f"{i}", "max_tokens": 9 + i, "temperature": i % 2, "ignore_eos": True} for i in range(6)]
        answers = await asyncio.gather(*(server.post(TEXT, **body) for body in bodies))
        assert sorted(len(row.tokens) for row in recorder.trace.rows) == sorted(
            answer["usage"]["completion_tokens"] for answer in answers
        )

    serve(pair, use, observer=recorder)
    write_trace(recorder.trace, tmp_path / "trace")
    assert [row.tokens for row in read_trace(tmp_path / "trace").rows] == [row.tokens for row in recorder.trace.rows]
    done = run_here(metrics_main, str(tmp_path / "trace"), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["survival:told", "ema", "off"])
def test_an_adaptive_server_says_what_the_target_says(pair, name):
    """And its counters add up to what responses tell."""
    verify = {b: {n: 1.0 + 0.02 * b * n for n in range(1, 10)} for b in (1, 4)}
    costs = Curve([1, 4], {b: [0.0, 0.1, 0.2, 0.3] for b in (1, 4)}, verify)
    policy = Fixed(0) if name == "off" else assembled(name, lambda: costs, sizes_of(DynamicTree(3, 3, 9)), [0.5] * 3)

    async def use(server):
        bodies = [{"prompt": f"{i}", "max_tokens": 12 + i, "temperature": i % 2, "seed": i} for i in range(9)]
        answers = await asyncio.gather(*(server.post(TEXT, **body) for body in bodies))
        for i, answer in enumerate(answers):
            assert answer["choices"][0]["text"] == solo(pair[0], f"{i}", 12 + i, seed=(i, 0), temperature=i % 2).text
        counters = await server.counters()
        told = [answer["metrics"]["speculative_decoding"] for answer in answers]
        for counter, field in (("drafts", "spec_steps"), ("draft_tokens", "draft_tokens")):
            assert counters[f"vllm:spec_decode_num_{counter}_total"] == sum(t[f"num_{field}"] for t in told)
        assert (sum(t["num_draft_tokens"] for t in told) == 0) == (name == "off")

    serve(pair, use, told={"acceptance": "summary"}, adaptive=policy)
