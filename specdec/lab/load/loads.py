"""A server's rounds under a load, by a policy and a cost curve: a simulation on recorded texts."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from specdec.adaptive import Curve, Policy
from specdec.lab.load.drive import spread
from specdec.lab.load.replayed import Bound, Drafts


@dataclass
class Request:
    """A text on its way through the server."""

    text: int
    arrived: float
    place: int = 0  # the root of its next round
    first: float = 0.0  # when its first token came


def prefill_seconds(curve: Curve, tokens: int) -> float:
    """A prompt's prefill: a plain round, and for each further token what one more node costs at the largest load."""
    rows = curve.rows[-1]
    _, verify = curve.at(rows)
    each = max(float(verify[-1] - verify[1]), 0.0) / (rows * (len(verify) - 2)) if len(verify) > 2 else 0.0
    return curve.plain(1) + each * (tokens - 1)


def closed(drafts: Drafts, policy: Policy, curve: Curve, rows: int, requests: int, bound: Bound | None = None) -> dict:
    """`rows` texts at a time, each followed by the next, until fewer are left: all rounds that count have as many rows.
    bound: of this load; the regret is told by it."""
    texts = iter(range(requests))
    running = [Request(next(texts) % len(drafts.roots), 0.0) for _ in range(min(rows, requests))]
    seconds = tokens = rounds = least = drafted = nodes = 0
    while len(running) == rows:
        for place, request in enumerate(running):
            if request.place >= drafts.roots[request.text]:
                following = next(texts, None)
                running[place] = None if following is None else Request(following % len(drafts.roots), 0.0)
        if None in running:
            break
        begun = [request.place for request in running]
        cost, levels, width = _round(drafts, policy, curve, running)
        seconds, rounds, drafted, nodes = seconds + cost, rounds + 1, drafted + levels, nodes + width
        for request, first in zip(running, begun, strict=True):
            end = min(request.place, drafts.roots[request.text])
            tokens += end - first
            least += bound.seconds(request.text, first, end) if bound is not None else 0.0
    speed = tokens / seconds
    found = {"tokens_per_second": speed, "interactivity": speed / rows, "tau": tokens / (rounds * rows)}
    found |= {"levels": drafted / rounds, "nodes": nodes / rounds, "concurrency": rows, "rate": None}
    return found | ({"regret": 1 - least / seconds} if bound is not None else {})


def arrivals(rate: float, requests: int, seed: int) -> list[float]:
    """Times of so many requests that come at random, `rate` a second."""
    draw, now, found = random.Random(seed), 0.0, []
    for _ in range(requests):
        found.append(now)
        now += draw.expovariate(rate)
    return found


def opened(drafts: Drafts, policy: Policy, curve: Curve, rows: int, times: list[float]) -> dict:
    """Requests that arrive at these times, of which `rows` run at a time, first come first served."""
    waiting = [Request(i % len(drafts.roots), at) for i, at in enumerate(times)]
    running, now, tokens = [], 0.0, 0
    ttfts, tpots = [], []
    while waiting or running:
        if not running:
            now = max(now, waiting[0].arrived)
        while waiting and waiting[0].arrived <= now and len(running) < rows:
            request = waiting.pop(0)
            now += prefill_seconds(curve, drafts.prompts[request.text])
            request.first = now
            ttfts.append(now - request.arrived)
            running.append(request)
        running = [request for request in running if drafts.roots[request.text]]
        if not running:
            continue
        now += _round(drafts, policy, curve, running)[0]
        for request in running:
            if request.place >= drafts.roots[request.text]:
                tokens += drafts.roots[request.text] + 1
                tpots.append((now - request.first) / drafts.roots[request.text])
        running = [request for request in running if request.place < drafts.roots[request.text]]
    return {"rate": len(times) / times[-1] if times[-1] else None, "tokens_per_second": tokens / now,
            "ttft_ms": spread([1e3 * t for t in ttfts]), "tpot_ms": spread([1e3 * t for t in tpots]),
            "interactivity": 1 / float(np.median(tpots)), "concurrency": None}  # fmt: skip


def _round(drafts: Drafts, policy: Policy, curve: Curve, running: list[Request]) -> tuple[float, int, int]:
    """Play a round; seconds, levels and nodes."""
    roots = np.array([drafts.starts[request.text] + request.place for request in running])
    levels, nodes, accepted = drafts.play(policy, roots)
    for request, count in zip(running, accepted, strict=True):
        request.place += count + 1
    return curve.seconds(len(running), levels, nodes), levels, nodes


def compare(
    drafts: Drafts, policies: dict[str, Callable[[], Policy]], curve: Curve, loads: list[int], requests: int
) -> list[dict]:
    """A line for each policy and number of texts in flight, with its regret."""
    found = []
    for rows in loads:
        bound = Bound(drafts, curve, rows)
        for name, make in policies.items():
            found.append({"policy": name} | closed(drafts, make(), curve, rows, max(requests, 4 * rows), bound))
    return found


def compare_open(
    drafts: Drafts,
    policies: dict[str, Callable[[], Policy]],
    curve: Curve,
    rates: list[float],
    requests: int,
    rows: int,
    seed: int = 0,
) -> list[dict]:
    """A line for each policy and rate of arrival."""
    return [
        {"policy": name} | opened(drafts, make(), curve, rows, arrivals(rate, requests, seed)) | {"rate": rate}
        for rate in rates
        for name, make in policies.items()
    ]
