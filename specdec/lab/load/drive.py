"""Many requests to a server: so many at a time (closed loop), or so many a second (open loop)."""

import asyncio
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specdec.lab.load.client import Answer, Asked, ask

COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


@dataclass(frozen=True)
class Load:
    """How requests arrive. One of the two is given."""

    concurrency: int | None = None  # at most so many at a time: the next is sent when one ends
    rate: float | None = None  # so many a second, at random (Poisson)

    def __str__(self) -> str:
        """Return the load in words."""
        return f"{self.concurrency} at a time" if self.rate is None else f"{self.rate:g} a second"


async def drive(client, asked: Asked, prompts: Sequence[str], load: Load, seed: int = 0) -> dict:
    """Send every prompt once and return the figures of the run (`figures_of`).

    The acceptance figures come from the server's counters.
    """
    before, start = await counters(client), time.perf_counter()
    slots, draw, tasks = asyncio.Semaphore(load.concurrency or len(prompts)), random.Random(seed), []

    async def one(number: int, prompt: str) -> Answer:
        async with slots:
            return await ask(client, asked.of(number), prompt)

    for number, prompt in enumerate(prompts):
        tasks.append(asyncio.create_task(one(number, prompt)))
        if load.rate is not None:
            await asyncio.sleep(draw.expovariate(load.rate))
    answers = await asyncio.gather(*tasks)
    seconds = max(answer.sent + answer.seconds for answer in answers) - start
    after = await counters(client)
    found = {"load": str(load), "concurrency": load.concurrency, "rate": load.rate}
    return found | figures_of(answers, seconds) | acceptance_of(before, after)


def figures_of(answers: Sequence[Answer], seconds: float) -> dict:
    """Throughput, and mean, median and P99 of the latencies of the valid answers, in ms."""
    valid = [answer for answer in answers if not answer.wrong]
    tokens = sum(answer.tokens for answer in valid)
    tpots = [answer.tpot for answer in valid if answer.tpot is not None]
    found = {
        "requests": len(answers),
        "valid": len(valid),
        "wrong": sorted({answer.wrong for answer in answers if answer.wrong})[:5],
        "seconds": seconds,
        "output_tokens": tokens,
        "prompt_tokens": sum(answer.prompt_tokens for answer in valid),
        "requests_per_second": len(valid) / seconds,
        "tokens_per_second": tokens / seconds,
        "ttft_ms": spread([1e3 * answer.arrivals[0] for answer in valid]),
        "tpot_ms": spread([1e3 * tpot for tpot in tpots]),
        "itl_ms": spread([1e3 * itl for answer in valid for itl in answer.itls]),
        "e2e_ms": spread([1e3 * answer.seconds for answer in valid]),
    }
    tpot: Any = found["tpot_ms"]
    median = tpot and tpot["median"]
    return found | {"interactivity": 1e3 / median if median else None}  # tokens per second of one client


def spread(values: Sequence[float]) -> dict | None:
    """Mean, median and 99th percentile; None of nothing."""
    if not values:
        return None
    return {"mean": float(np.mean(values)), "median": float(np.median(values)), "p99": float(np.quantile(values, 0.99))}


async def counters(client) -> dict[str, float]:
    """VLLM's counters of speculation, summed over labels; empty where a server has none."""
    import httpx2  # an extra

    try:
        answer = await client.get("/metrics")
    except httpx2.HTTPError:
        return {}
    found: dict[str, float] = {}
    if answer.status_code == 200:
        for name, value in re.findall(r"^vllm:spec_decode_(\w+)_total(?:\{[^}]*\})? (\S+)$", answer.text, re.M):
            found[name] = found.get(name, 0.0) + float(value)
    return found


def acceptance_of(before: dict[str, float], after: dict[str, float]) -> dict:
    """Return the acceptance length of a run, and the share of drafted tokens that were accepted, from the counters."""
    drafts, drafted, accepted = (after.get(name, 0.0) - before.get(name, 0.0) for name in COUNTERS)
    if not drafts:
        return {"acceptance_length": None, "acceptance_rate": None}
    return {"acceptance_length": 1 + accepted / drafts, "acceptance_rate": accepted / drafted}
