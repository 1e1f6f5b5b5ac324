"""What policies are worth by the load, without a network: schedulers of several ways in one process, closed loop.

    python scripts/scheduler_load.py --prompts MT_BENCH --out runs/load

On a shared machine one server may be faster than its twin by a tenth for minutes. So here the ways take turns of half
a second or so, in changing order, until so many chats have ended. Each keeps so many going, the same for all ways, with
answers of 32 to 96 tokens by the number of the chat. A way's clock stands still while others have their turn. Prints
tokens/s, the medians of TTFT and TPOT, and each way's tokens/s as a share of those of the better of plain decoding and
the fixed tree, with the standard error (jackknife over the turns). Writes load.json, load.md and load.png into the
folder. The machine must be idle.
"""

import argparse
import random
import time
from collections.abc import Sequence

import checkout  # noqa: F401
import numpy as np
import torch
from serve_load import ROOM, WAYS, add_load_flags, serve_flags, table

from specdec.api import load_target
from specdec.cli.errors import one_sentence_errors
from specdec.cli.files import write_text
from specdec.engine.engine import Engine
from specdec.lab.load.chart import write_chart
from specdec.lab.load.client import Asked
from specdec.lab.load.drive import spread
from specdec.lab.machine import provenance
from specdec.lab.output import write_json
from specdec.lab.sweep.benchmarks import load_benchmark
from specdec.model.target import Target
from specdec.serve import serve_command
from specdec.serve.jobs import Delta, Job
from specdec.serve.scheduler import Scheduler
from specdec.text import encode_prompt

TURN = 8  # chats that end
WARM_UPS = 3  # turns that do not count: compiled rounds are asked for in them
ASKED = Asked("", max_tokens=64, range_ratio=0.5)
FIXED = ("plain", "fixed 4/5/16")  # what the others are held against


class Chats:
    """So many chats at a time with one scheduler, whose thread is not started: `play` does its work."""

    def __init__(self, scheduler: Scheduler, prompts: Sequence[list[int]], load: int):
        self.scheduler, self.prompts = scheduler, prompts
        self.asked, self.clock, self.since = 0, 0.0, time.perf_counter()
        self.begun: dict[Job, float] = {}  # when a chat was asked, until it is told of its first token
        self.first: dict[Job, float] = {}  # and when that was, until it ends
        self.turns: list[tuple[int, float]] = []  # tokens and seconds of each
        self.tokens = self.ended = 0
        self.ttfts, self.tpots = list[float](), list[float]()
        scheduler.deliver = self.take
        for _ in range(load):
            self.ask()

    def now(self) -> float:
        return self.clock + time.perf_counter() - self.since

    def ask(self) -> None:
        number, self.asked = self.asked, self.asked + 1
        most, prompt = ASKED.of(number).max_tokens, self.prompts[number % len(self.prompts)]
        job = Job(prompt, lambda delta: None, max_new_tokens=most, eos=frozenset())
        self.begun[job] = self.now()
        self.scheduler.submit([job])

    def take(self, deltas: list[Delta]) -> None:
        now = self.now()
        for delta in deltas:
            job = delta.job
            if delta.finish == "error":
                raise RuntimeError(delta.error)
            self.tokens += len(delta.tokens)
            if job not in self.first:
                self.first[job] = now
                self.ttfts.append(now - self.begun.pop(job))
            if delta.finish is not None:
                self.tpots.append((now - self.first.pop(job)) / (job.max_new_tokens - 1))
                self.ended += 1
                self.ask()

    def play(self) -> None:
        """A turn."""
        goal, before = self.ended + TURN, self.tokens
        self.scheduler.since = None  # what others did meanwhile is no part of a round
        self.since = time.perf_counter()
        while self.ended < goal:
            self.scheduler._turn()
        seconds = time.perf_counter() - self.since
        self.clock += seconds
        self.turns.append((self.tokens - before, seconds))

    def forget(self) -> None:
        """What was measured so far."""
        self.turns, self.ttfts, self.tpots = [], [], []

    def figures(self) -> dict:
        """As `specdec.lab.load.drive.drive` names them."""
        ttft, tpot = (spread([1e3 * value for value in values]) for values in (self.ttfts, self.tpots))
        tokens, seconds = map(sum, zip(*self.turns, strict=True))
        told = {"tokens_per_second": tokens / seconds, "ttft_ms": ttft, "tpot_ms": tpot}
        return told | {"interactivity": 1e3 / tpot["median"], "tokens_and_seconds_by_turn": self.turns}


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_load_flags(p)
    p.add_argument("--ways", nargs="+", default=[*FIXED, "table, chain", "survival, chain"], choices=list(WAYS))
    p.add_argument("--turns", type=int, default=64, help=f"of {TURN} chats, of each way at each load (default 64)")
    return p


@one_sentence_errors
def main() -> None:
    args = parser().parse_args()
    loads = [int(load) for load in args.concurrency.split(",")]
    target = load_target("demo/target")  # one for all: two in memory may differ in speed
    engines = {way: engine(args, WAYS[way], max(loads), target) for way in args.ways}
    asked = load_benchmark("prompts", args.prompts, turns=1, bad="skip", limit=64).questions
    prompts = [encode_prompt(target, question.turns[0]) for question in asked]
    told: dict[str, list[dict]] = {way: [] for way in args.ways}
    order, draw = list(args.ways), random.Random(0)
    for load in loads:
        chats = {way: Chats(Scheduler(engines[way], rows=max(loads), room=ROOM), prompts, load) for way in args.ways}
        for way in args.ways:
            for _ in range(WARM_UPS):
                chats[way].play()
                if engines[way].graphs is not None:
                    engines[way].graphs.finish()
            chats[way].forget()
        for _ in range(args.turns):
            draw.shuffle(order)
            for way in order:
                chats[way].play()
        for way in args.ways:
            told[way].append({"concurrency": load} | chats[way].figures())
        print(f"{load}: {compared({way: points[-1] for way, points in told.items()})}", flush=True)
    settings = {"machine": provenance(torch.device("cpu")), "settings": str(vars(args))}
    args.out.mkdir(parents=True, exist_ok=True)
    write_json(args.out / "load.json", settings | {"loads": told})
    write_text(args.out / "load.md", table(told))
    write_chart(args.out / "load.png", told)
    print(table(told))


def engine(args: argparse.Namespace, words: list[str], rows: int, target: Target) -> Engine:
    flags = serve_command.parser().parse_args(serve_flags(args, words, rows))
    return serve_command.make_engine(flags, target)


def compared(ways: dict[str, dict]) -> str:
    """Every way's share of the better of the fixed ones, with its standard error."""
    known = [way for way in FIXED if way in ways]
    better = max(known or ways, key=lambda way: ways[way]["tokens_per_second"])
    told = []
    for way in ways:
        share, error = share_of(*(ways[name]["tokens_and_seconds_by_turn"] for name in (way, better)))
        told.append(f"{way} {share:.3f} ± {error:.3f}")
    return f"{'; '.join(told)} of {better}"


def share_of(mine: list[tuple[int, float]], theirs: list[tuple[int, float]]) -> tuple[float, float]:
    """The quotient of two speeds, and its standard error: jackknife over the turns."""
    turns = np.concatenate([mine, theirs], axis=1)  # [n,4]

    def share(sums: np.ndarray) -> np.ndarray:
        return sums[..., 0] / sums[..., 1] / (sums[..., 2] / sums[..., 3])

    left = share(turns.sum(0) - turns)  # [n], each without one of them
    return float(share(turns.sum(0))), float(((len(left) - 1) * left.var()) ** 0.5)


if __name__ == "__main__":
    main()
