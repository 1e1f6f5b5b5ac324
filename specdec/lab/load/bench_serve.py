"""Measure a server that speaks OpenAI's interface: docs/serve.md says what the numbers mean."""

import argparse
import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from specdec.cli.terminal import console, print_table
from specdec.lab.load.client import Asked
from specdec.lab.load.drive import Load, drive
from specdec.lab.output import progress_bar, write_figure, write_json
from specdec.lab.sweep.benchmarks import load_benchmark

KEY = "OPENAI_API_KEY"


def run(args: argparse.Namespace) -> None:
    """Run `specdec lab bench serve`. Raises ValueError if an answer is not valid."""
    found = load_benchmark("prompts", args.prompts, turns=1, bad="skip", limit=args.limit)
    own = [question.turns[0] for question in found.questions]
    prompts = [own[i % len(own)] for i in range(args.limit)]
    run = asyncio.run(measure(args, prompts))
    print_loads(run)
    if args.out is not None:
        write_json(args.out, run)
    if args.chart is not None:
        write_chart(args.chart, run)
    if args.json:
        print(json.dumps(run))
    bad = sum(point["requests"] - point["valid"] for point in run["loads"])
    if bad:
        wrong = next(point["wrong"][0] for point in run["loads"] if point["wrong"])
        raise ValueError(f"{bad} answers are not valid, such as: {wrong}")


async def measure(args: argparse.Namespace, prompts: Sequence[str], transport=None) -> dict:
    """All loads, one after the other. transport: to reach an application in this process.

    ValueError if there is no such server.
    """
    import httpx2

    key = args.api_key or os.environ.get(KEY)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    how: dict[str, Any] = {"timeout": args.timeout, "headers": headers, "limits": httpx2.Limits(max_connections=None)}
    loads = [Load(rate=rate) for rate in args.rate or ()] or [Load(n) for n in args.concurrency or (1, 8, 32)]
    async with httpx2.AsyncClient(base_url=args.server.removesuffix("/v1"), transport=transport, **how) as client:
        model = args.served_model_name or await first_model(client)
        drawn = args.temperature, args.ignore_eos, args.seed, args.range_ratio
        asked = Asked(model, args.max_new_tokens, not args.completions, *drawn)
        shown, points = progress_bar("loads"), []
        for number, load in enumerate(loads, 1):
            if args.warm_up:
                few = [prompts[i % len(prompts)] for i in range(args.warm_up)]
                await drive(client, asked, few, Load(min(args.warm_up, load.concurrency or 8)))
            points.append(await drive(client, asked, prompts, load, args.seed))
            shown(number, len(loads))
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
        lengths = point["acceptance_length"]
        table.add_row(
            point["load"],
            f"{point['valid']} of {point['requests']}",
            f"{point['tokens_per_second']:.1f}",
            f"{point['requests_per_second']:.2f}",
            *("" if s is None else "{mean:.1f} / {median:.1f} / {p99:.1f}".format(**s) for s in spreads),
            "" if lengths is None else f"{lengths:.2f}",
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
        axis.set_xlabel("interactivity: tokens/s of one answer (1 / median TPOT)")
        axis.set_ylabel("throughput: tokens/s of all")
        axis.set_ylim(bottom=0)
        axis.legend()
        write_figure(path, figure)
