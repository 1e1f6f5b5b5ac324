"""Measure a server that speaks OpenAI's interface: docs/serve.md says what the numbers mean."""

import argparse
import asyncio
import json
import os
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from tqdm import tqdm

from specdec.cli.terminal import console, print_table
from specdec.lab.output import write_figure, write_json
from specdec.lab.sweep.benchmarks import load_benchmark

KEY = "OPENAI_API_KEY"
COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")

# Times are those of vLLM's benchmark: an event with a non-empty `choices` counts, also without text. The first is the
# TTFT, each later one an ITL, and TPOT is (last event - first event) / (tokens - 1), by the server's usage.


@dataclass(frozen=True)
class Asked:
    """What every request of a run has in common."""

    model: str
    max_tokens: int
    chat: bool = True
    temperature: float = 0.0
    ignore_eos: bool = False
    seed: int | None = None
    range_ratio: float = 0.0  # the most tokens of request i are drawn, by i, from (1 - this) to (1 + this) of these

    def of(self, number: int) -> "Asked":
        """What is asked in request `number`: the same of every server, and at every load."""
        if not self.range_ratio:
            return self
        share = 1 + self.range_ratio * random.Random(number).uniform(-1, 1)
        return replace(self, max_tokens=max(1, round(share * self.max_tokens)), range_ratio=0.0)

    def body(self, prompt: str) -> dict:
        """Return the JSON body of a streaming request for this prompt."""
        own = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        limit = {"max_completion_tokens" if self.chat else "max_tokens": self.max_tokens}
        how = {"temperature": self.temperature, "stream": True, "stream_options": {"include_usage": True}}
        how |= {"ignore_eos": True} if self.ignore_eos else {}
        how |= {"seed": self.seed} if self.seed is not None else {}
        return {"model": self.model} | own | limit | how


@dataclass
class Answer:
    """A response. Times are seconds since the request was sent."""

    sent: float  # on `time.perf_counter`
    arrivals: list[float] = field(default_factory=list)  # of events with choices
    seconds: float = 0.0  # until the stream ended
    prompt_tokens: int = 0
    tokens: int = 0
    text: str = ""
    finish: str | None = None
    wrong: str = ""  # why it is not valid

    @property
    def tpot(self) -> float | None:
        """None for an answer of one token."""
        return (self.arrivals[-1] - self.arrivals[0]) / (self.tokens - 1) if self.tokens > 1 else None

    def take(self, event: dict) -> None:
        """Add an event of the stream, which has just arrived."""
        if "error" in event:
            self.wrong = str(event["error"].get("message", event["error"]))
        if event.get("choices"):
            self.arrivals.append(time.perf_counter() - self.sent)
            choice = event["choices"][0]
            self.text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            self.finish = choice.get("finish_reason") or self.finish
        if usage := event.get("usage"):
            self.tokens, self.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]

    def fault(self, asked: Asked, done: bool) -> str:
        """Why an answer that came without an error is not valid, or ''. done: the stream said that it ends."""
        if not done:
            return "the stream has no end"
        if not self.arrivals or self.finish is None:
            return "the stream has no text, or no finish_reason"
        if not self.tokens:
            return "the server tells no usage"
        if self.tokens > asked.max_tokens or (asked.ignore_eos and self.tokens != asked.max_tokens):
            return f"{self.tokens} tokens came, and {asked.max_tokens} were asked for"
        return ""


async def ask(client, asked: Asked, prompt: str) -> Answer:
    """Send a request by an `httpx2.AsyncClient` and read its stream. What goes wrong is noted in the answer."""
    import httpx2

    answer, done = Answer(time.perf_counter()), False
    path = "/v1/chat/completions" if asked.chat else "/v1/completions"
    try:
        async with client.stream("POST", path, json=asked.body(prompt)) as response:
            if response.status_code != 200:
                reply = (await response.aread()).decode(errors="replace")
                answer.wrong = f"status {response.status_code}: {reply[:200]}"
                return answer
            async for line in response.aiter_lines():  # comments are skipped
                if line.startswith("data:"):
                    data = line.removeprefix("data:").strip()
                    done = data == "[DONE]"
                    if not done:
                        answer.take(json.loads(data))
        answer.wrong = answer.wrong or answer.fault(asked, done)
    except (httpx2.HTTPError, ValueError, KeyError) as error:
        answer.wrong = f"{type(error).__name__}: {error}"
    finally:
        answer.seconds = time.perf_counter() - answer.sent
    return answer


async def drive(
    client, asked: Asked, prompts: Sequence[str], concurrency: int | None = None, rate: float | None = None, seed=0
) -> dict:
    """Send every prompt once and return the figures of the run, with the acceptance by the server's counters.

    concurrency: at most so many at a time; the next is sent when one ends. rate: so many a second, at random (Poisson).
    """
    before, start = await counters(client), time.perf_counter()
    slots, draw, tasks = asyncio.Semaphore(concurrency or len(prompts)), random.Random(seed), []

    async def one(number: int, prompt: str) -> Answer:
        async with slots:
            return await ask(client, asked.of(number), prompt)

    for number, prompt in enumerate(prompts):
        tasks.append(asyncio.create_task(one(number, prompt)))
        if rate is not None:
            await asyncio.sleep(draw.expovariate(rate))
    answers = await asyncio.gather(*tasks)
    seconds = max(answer.sent + answer.seconds for answer in answers) - start
    after = await counters(client)
    drafts, drafted, accepted = (after.get(name, 0.0) - before.get(name, 0.0) for name in COUNTERS)
    load = f"{concurrency} at a time" if rate is None else f"{rate:g} a second"
    return {"load": load, "concurrency": concurrency, "rate": rate} | figures_of(answers, seconds) | {
        "acceptance_length": 1 + accepted / drafts if drafts else None,
        "acceptance_rate": accepted / drafted if drafts else None,
    }  # fmt: skip


def figures_of(answers: Sequence[Answer], seconds: float) -> dict:
    """Throughput, and mean, median and P99 of the latencies of the valid answers, in ms."""
    valid = [answer for answer in answers if not answer.wrong]
    tokens = sum(answer.tokens for answer in valid)
    tpot = spread([1e3 * answer.tpot for answer in valid if answer.tpot is not None])
    return {
        "requests": len(answers),
        "valid": len(valid),
        "wrong": sorted({answer.wrong for answer in answers if answer.wrong})[:5],
        "seconds": seconds,
        "output_tokens": tokens,
        "prompt_tokens": sum(answer.prompt_tokens for answer in valid),
        "requests_per_second": len(valid) / seconds,
        "tokens_per_second": tokens / seconds,
        "ttft_ms": spread([1e3 * answer.arrivals[0] for answer in valid]),
        "tpot_ms": tpot,
        "itl_ms": spread([1e3 * (b - a) for answer in valid for a, b in pairwise(answer.arrivals)]),
        "e2e_ms": spread([1e3 * answer.seconds for answer in valid]),
        "interactivity": 1e3 / tpot["median"] if tpot and tpot["median"] else None,  # tokens/s of one client
    }


def spread(values: Sequence[float]) -> dict | None:
    """Mean, median and 99th percentile; None of nothing."""
    if not values:
        return None
    return {"mean": float(np.mean(values)), "median": float(np.median(values)), "p99": float(np.quantile(values, 0.99))}


async def counters(client) -> dict[str, float]:
    """VLLM's counters of speculation, summed over labels; empty where a server has none."""
    import httpx2

    try:
        answer = await client.get("/metrics")
    except httpx2.HTTPError:
        return {}
    found: dict[str, float] = {}
    if answer.status_code == 200:
        for name, value in re.findall(r"^vllm:spec_decode_(\w+)_total(?:\{[^}]*\})? (\S+)$", answer.text, re.M):
            found[name] = found.get(name, 0.0) + float(value)
    return found


def run(args: argparse.Namespace) -> None:
    """Run `specdec lab bench serve`. Raises ValueError if an answer is not valid."""
    found = load_benchmark("prompts", args.prompts, turns=1, bad="skip", limit=args.limit)
    own = [question.turns[0] for question in found.questions]
    run = asyncio.run(measure(args, [own[i % len(own)] for i in range(args.limit)]))
    print_loads(run)
    if args.out is not None:
        write_json(args.out, run)
    if args.chart is not None:
        write_chart(args.chart, run)
    if args.json:
        print(json.dumps(run))
    if bad := sum(point["requests"] - point["valid"] for point in run["loads"]):
        wrong = next(point["wrong"][0] for point in run["loads"] if point["wrong"])
        raise ValueError(f"{bad} answers are not valid, such as: {wrong}")


async def measure(args: argparse.Namespace, prompts: Sequence[str], transport=None) -> dict:
    """All loads in order. transport: to an application in this process. ValueError if there is no such server."""
    import httpx2

    key = args.api_key or os.environ.get(KEY)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    how: dict[str, Any] = {"timeout": args.timeout, "headers": headers, "limits": httpx2.Limits(max_connections=None)}
    rates, numbers = args.rate or (), args.concurrency or (1, 8, 32)
    loads = [{"rate": rate} for rate in rates] or [{"concurrency": number} for number in numbers]
    async with httpx2.AsyncClient(base_url=args.server.removesuffix("/v1"), transport=transport, **how) as client:
        model = args.served_model_name or await first_model(client)
        drawn = args.temperature, args.ignore_eos, args.seed, args.range_ratio
        asked = Asked(model, args.max_new_tokens, not args.completions, *drawn)
        points = []
        for load in tqdm(loads, desc="loads"):
            if args.warm_up:
                few = [prompts[i % len(prompts)] for i in range(args.warm_up)]
                await drive(client, asked, few, min(args.warm_up, load.get("concurrency", 8)))
            points.append(await drive(client, asked, prompts, **load, seed=args.seed))
    return {"model": model, "url": args.server, "asked": asked.body("..."), "loads": points}


async def first_model(client) -> str:
    """Return the id of the first model that the server lists. Raises ValueError if it lists none."""
    import httpx2

    try:
        answer = await client.get("/v1/models")
        return answer.raise_for_status().json()["data"][0]["id"]
    except (httpx2.HTTPError, ValueError, KeyError, IndexError) as error:
        raise ValueError(f"{client.base_url} does not tell its models: {error}") from None


def print_loads(run: dict) -> None:
    """Print a table with one row for each load."""
    table = Table(title=f"{run['model']} at {run['url']}; TTFT, TPOT and ITL in ms: mean / median / P99")
    for column in ("load", "valid", "tokens/s", "requests/s", "TTFT", "TPOT", "ITL", "accepted length"):
        table.add_column(column, justify="right")
    for point in run["loads"]:
        spreads = [point[name] for name in ("ttft_ms", "tpot_ms", "itl_ms")]
        length = point["acceptance_length"]
        table.add_row(
            point["load"],
            f"{point['valid']} of {point['requests']}",
            f"{point['tokens_per_second']:.1f}",
            f"{point['requests_per_second']:.2f}",
            *("" if s is None else "{mean:.1f} / {median:.1f} / {p99:.1f}".format(**s) for s in spreads),
            "" if length is None else f"{length:.2f}",
        )
    print_table(console(140), table, ("requests/s", "ITL"))


def write_chart(path: Path, run: dict) -> None:
    """Draw throughput against interactivity, a point for each load."""
    from matplotlib import rc_context

    from specdec.lab.figure_style import STYLE, looks_of, subplots

    name, points = run["model"], [point for point in run["loads"] if point["interactivity"]]
    with rc_context(STYLE):
        figure, axis = subplots(figsize=(6.4, 4.2))
        xs, ys = ([point[key] for point in points] for key in ("interactivity", "tokens_per_second"))
        axis.plot(xs, ys, label=name, **looks_of(name, [name]))
        for x, y, point in zip(xs, ys, points, strict=True):
            axis.annotate(f"{point['concurrency'] or point['rate']:g}", (x, y), (3, 3), textcoords="offset points")
        axis.set(xlabel="interactivity: tokens/s of one answer (1 / median TPOT)", ylabel="throughput: tokens/s of all")
        axis.set_ylim(bottom=0)
        axis.legend()
        write_figure(path, figure)
