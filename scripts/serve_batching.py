"""What continuous batching is worth: the same chats one at a time, in static batches, and joining as rows get free.

    python scripts/serve_batching.py --prompts MT_BENCH --out runs/batching.json

All chats are there from the beginning, and their answers have 32 to 96 tokens, by the number of the chat. A static
batch begins when the one before has ended; its rows that have ended are carried along, or dropped. The ways take turns
in one process, and every answer must be the same in all of them. Prints tokens/s, and the mean of the seconds until an
answer was there, by the number of rows: medians of --repeats turns. The machine must be idle.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import checkout  # noqa: F401
import torch

from specdec.cli.errors import one_sentence_errors
from specdec.engine.engine import Engine
from specdec.engine.sequence import Sequence
from specdec.lab.load.client import Asked
from specdec.lab.machine import provenance
from specdec.lab.models import add_model_flags, load_models
from specdec.lab.output import write_json
from specdec.lab.sweep.benchmarks import load_benchmark
from specdec.text import encode_prompt
from specdec.trees.spec import TreeSpec

Done = list[tuple[list[int], float]]  # of every chat its tokens, and the seconds until they were there


class Chats:
    """What is asked, and the ways to answer it."""

    def __init__(self, prompts: list[list[int]]):
        self.prompts = prompts
        asked = Asked("", max_tokens=64, range_ratio=0.5)
        self.lengths = [asked.of(i).max_tokens for i in range(len(prompts))]
        self.room = max(map(len, prompts)) + 96

    def static(self, engine: Engine, rows: int) -> Done:
        """Batch after batch."""
        begun, done = time.perf_counter(), []
        for first in range(0, len(self.prompts), rows):
            batch = slice(first, first + rows)
            how = {"max_new_tokens": self.lengths[batch], "eos": frozenset()}
            found = engine.generate(self.prompts[batch], **how).rows
            done += [(row.tokens, time.perf_counter() - begun) for row in found]
        return done

    def continuous(self, engine: Engine, rows: int) -> Done:
        """A chat joins as soon as a row is free."""
        begun, ends = time.perf_counter(), dict[Sequence, float]()
        engine.reserve(rows, self.room)
        asked = zip(self.prompts, self.lengths, strict=True)
        sequences = [engine.add(prompt, max_new_tokens=n, eos=frozenset()) for prompt, n in asked]
        while (report := engine.step()) is not None:
            for row in report.rows:
                if row.finish is not None:
                    ends.setdefault(row, time.perf_counter() - begun)
        return [(sequence.tokens, ends[sequence]) for sequence in sequences]


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_flags(p, "token_map", "draft_dtype")
    p.set_defaults(draft="demo/mtp", token_map="demo/frspec_4096.json", draft_dtype="int8")
    p.add_argument("--prompts", required=True)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--rows", default="4,16,32")
    p.add_argument("--steps", type=int, default=2, help="of the chain that is drafted (default 2)")
    p.add_argument("--num-prompts", type=int, default=64)
    p.add_argument("--repeats", type=int, default=5)
    return p


@one_sentence_errors
def main() -> None:
    args = parser().parse_args()
    target, drafter = load_models(args)
    asked = load_benchmark("prompts", args.prompts, turns=1, bad="skip", limit=args.num_prompts).questions
    chats = Chats([encode_prompt(target, q.turns[0]) for q in asked])
    drafts = {"plain": (), f"a chain of {args.steps}": (drafter, TreeSpec(1, args.steps).build())}
    told = {}
    for rows in map(int, args.rows.split(",")):
        for name, parts in drafts.items():
            told[rows, name] = turns(ways_of(chats, target, parts, rows), args.repeats)
    write_json(args.out, {"machine": provenance(torch.device("cpu")), "settings": str(vars(args)),
                          "loads": [{"rows": rows, "draft": name, "ways": ways}
                                    for (rows, name), ways in told.items()]})  # fmt: skip
    print(table(told))


def ways_of(chats: Chats, target, parts: tuple, rows: int) -> dict[str, Callable[[], Done]]:
    carrying, dropping = (Engine(target, *parts, compact=compact) for compact in (False, True))
    return {
        "one at a time": lambda: chats.static(dropping, 1),
        "static batches": lambda: chats.static(carrying, rows),
        "static batches, ended rows dropped": lambda: chats.static(dropping, rows),
        "continuous": lambda: chats.continuous(dropping, rows),
    }


def turns(ways: dict[str, Callable[[], Done]], repeats: int) -> dict[str, dict[str, float]]:
    """Medians of each way. ValueError if an answer differs."""
    speeds, waits = ({way: [] for way in ways} for _ in range(2))
    first = None
    for turn in range(repeats + 1):
        for way, answer in ways.items():
            begun = time.perf_counter()
            done = answer()
            seconds, texts = time.perf_counter() - begun, [tokens for tokens, _ in done]
            first = first or texts
            if texts != first:
                raise ValueError(f"an answer differs: {way}")
            if turn:  # the first warms up
                speeds[way].append(sum(map(len, texts)) / seconds)
                waits[way].append(statistics.mean(end for _, end in done))
    middle = statistics.median
    return {way: {"tokens_per_second": middle(speeds[way]), "seconds_to_answer": middle(waits[way])} for way in ways}


def table(told: dict[tuple[int, str], dict[str, dict[str, float]]]) -> str:
    """Markdown: tokens/s, and the mean seconds until an answer was there."""
    ways = list(next(iter(told.values())))
    lines = [f"| rows | {' | '.join(ways)} |", f"|---|{'---|' * len(ways)}"]
    for (rows, name), found in told.items():
        cells = [f"{found[way]['tokens_per_second']:.0f} ({found[way]['seconds_to_answer']:.1f} s)" for way in ways]
        lines.append(f"| {rows}, {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
