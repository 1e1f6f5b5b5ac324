"""The command `specdec bench serve`: measures any server that speaks OpenAI's interface."""

import argparse
import asyncio
import json
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from rich.table import Table

from specdec.cli.errors import one_sentence_errors
from specdec.cli.files import check_writable
from specdec.cli.flags import command_parser, whole_numbers
from specdec.cli.terminal import console, print_table
from specdec.lab.load.client import Asked
from specdec.lab.load.drive import Load, drive
from specdec.lab.output import progress_bar, write_figure, write_json
from specdec.lab.sweep.benchmarks import load_benchmark

KEY = "OPENAI_API_KEY"


def parser() -> argparse.ArgumentParser:
    p = command_parser("bench serve", "Measure a server: docs/serve.md.", "--prompts FILE [options]")
    server = p.add_argument_group("server")
    server.add_argument("--base-url", default="http://127.0.0.1:8000", help="(default http://127.0.0.1:8000)")
    server.add_argument("--model", help="(default: the first that the server has)")
    server.add_argument("--api-key", metavar="KEY", help=f"(default: ${KEY})")
    server.add_argument("--timeout", type=float, default=600.0, help="seconds of a request at most (default 600)")
    asked = p.add_argument_group("requests")
    asked.add_argument(
        "--prompts", required=True, metavar="FILE", help="of MT-bench, of ShareGPT, or lines with `prompt`"
    )
    asked.add_argument("--num-prompts", type=int, default=80, help="at each load (default 80); they are used again")
    asked.add_argument("--completions", action="store_true", help="ask for completions, not in chats")
    asked.add_argument("--max-new-tokens", type=int, default=64, help="(default 64)")
    asked.add_argument(
        "--range-ratio",
        type=float,
        default=0.0,
        metavar="X",
        help="let that number vary by so large a share (default 0)",
    )
    asked.add_argument("--ignore-eos", action="store_true", help="answers have exactly so many tokens")
    asked.add_argument("--temperature", type=float, default=0.0, help="(default 0)")
    asked.add_argument("--seed", type=int, default=0, help="of arrivals, and of draws (default 0)")
    load = p.add_argument_group("load")
    load.add_argument("--concurrency", type=whole_numbers, metavar="N,N,...", help="so many at a time (default 1,8,32)")
    load.add_argument("--rate", type=rates, metavar="X,X,...", help="instead: so many a second, at random")
    load.add_argument("--warm-up", type=int, default=4, help="requests before each load, not counted (default 4)")
    out = p.add_argument_group("output")
    out.add_argument("--out", type=Path, metavar="FILE", help="all figures, JSON")
    out.add_argument("--chart", type=Path, metavar="FILE", help="throughput against interactivity, PNG")
    out.add_argument("--json", action="store_true", help="everything as one JSON object in the last line")
    return p


def rates(text: str) -> list[float]:
    """'0.5,2' -> [0.5, 2.0], all positive."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) <= 0:
        raise argparse.ArgumentTypeError(f"wants positive numbers with commas between them, and not {text!r}")
    return found


@one_sentence_errors
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    check(args)
    found = load_benchmark("prompts", args.prompts, turns=1, bad="skip", limit=args.num_prompts)
    own = [question.turns[0] for question in found.questions]
    prompts = [own[i % len(own)] for i in range(args.num_prompts)]
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


def check(args: argparse.Namespace) -> None:
    """ValueError for what cannot be done, before anything is sent."""
    if find_spec("httpx2") is None:
        raise ValueError("httpx2 is not installed: pip install 'specdec[serve]'")
    if args.rate is not None and args.concurrency is not None:
        raise ValueError("--rate contradicts --concurrency: requests arrive in one of the two ways")
    if min(args.num_prompts, args.max_new_tokens, *(args.concurrency or [1])) < 1 or args.warm_up < 0:
        raise ValueError("--num-prompts, --max-new-tokens and --concurrency must be at least 1, --warm-up at least 0")
    if not 0 <= args.range_ratio < 1:
        raise ValueError(f"--range-ratio must be at least 0 and below 1, got {args.range_ratio:g}")
    for path in (args.out, args.chart):
        if path is not None:
            check_writable(path)


async def measure(args: argparse.Namespace, prompts: Sequence[str], transport=None) -> dict:
    """All loads, one after the other. transport: to reach an application in this process.

    ValueError if there is no such server."""
    import httpx2

    key = args.api_key or os.environ.get(KEY)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    how = {"timeout": args.timeout, "headers": headers, "limits": httpx2.Limits(max_connections=None)}
    loads = [Load(rate=rate) for rate in args.rate or ()] or [Load(n) for n in args.concurrency or (1, 8, 32)]
    async with httpx2.AsyncClient(base_url=args.base_url.removesuffix("/v1"), transport=transport, **how) as client:
        model = args.model or await first_model(client)
        drawn = args.temperature, args.ignore_eos, args.seed, args.range_ratio
        asked = Asked(model, args.max_new_tokens, not args.completions, *drawn)
        shown, points = progress_bar("loads"), []
        for number, load in enumerate(loads, 1):
            if args.warm_up:
                few = [prompts[i % len(prompts)] for i in range(args.warm_up)]
                await drive(client, asked, few, Load(min(args.warm_up, load.concurrency or 8)))
            points.append(await drive(client, asked, prompts, load, args.seed))
            shown(number, len(loads))
    return {"model": model, "url": args.base_url, "asked": asked.body("..."), "loads": points}


async def first_model(client) -> str:
    import httpx2

    try:
        answer = await client.get("/v1/models")
        return answer.raise_for_status().json()["data"][0]["id"]
    except (httpx2.HTTPError, ValueError, KeyError, IndexError) as error:
        raise ValueError(f"{client.base_url} does not tell its models: {error}") from None


def print_loads(run: dict) -> None:
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


if __name__ == "__main__":
    main()
