"""What it saves to keep what has been read of prompts: chats of several turns, in which each turn sends all before it.

    python scripts/prefix_turns.py --prompts MT_BENCH --out prefix.json

Two engines answer each turn, one that keeps prompts and one that does not, in changing order. Their texts must be the
same. For every turn of a chat: tokens of the prompt and how many of them were not read again, the medians over chats of
the milliseconds until the first token, and the ratio of the two. The last line is one JSON object.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import checkout  # noqa: F401

from specdec.api import DEMO_TARGET, load_drafter, load_target
from specdec.cli.errors import one_sentence_errors
from specdec.engine.engine import Engine
from specdec.engine.sequence import Sequence
from specdec.lab.machine import provenance
from specdec.lab.models import check_counts
from specdec.lab.output import write_json
from specdec.lab.sweep.benchmarks import load_benchmark
from specdec.text import decode_row, encode_chat
from specdec.trees import Chain

ROOM = 4096
WAYS = {"read again": 0, "kept": 256 << 20}


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--prompts", required=True, help="a file of prompts; each turn asks the next one")
    p.add_argument("--target", default=str(DEMO_TARGET))
    p.add_argument("--draft", default="demo/mtp")
    p.add_argument("--chats", type=int, default=8)
    p.add_argument("--turns", type=int, default=6)
    p.add_argument("--max-new-tokens", type=int, default=64)
    p.add_argument("--out", type=Path, help="a JSON file")
    args = p.parse_args()
    check_counts(args, "chats", "turns", "max_new_tokens")
    return args


def answer(engine: Engine, prompt: list[int], tokens: int) -> tuple[Sequence, float]:
    """An answer, and the milliseconds until its first token."""
    start = time.perf_counter()
    row = engine.add(prompt, max_new_tokens=tokens)
    while not row.tokens:
        engine.step()
    first = time.perf_counter() - start
    while engine.step() is not None:
        pass
    return row, 1e3 * first


def play(engines: dict[str, Engine], asked: list[str], tokens: int, flip: bool) -> list[dict]:
    """A chat: by turn, what came of it."""
    target, history, turns = next(iter(engines.values())).target, [], []
    for question in asked:
        history.append({"role": "user", "content": question})
        prompt, flip = encode_chat(target, history), not flip
        order = sorted(engines, reverse=flip)
        rows = {name: answer(engines[name], prompt, tokens) for name in order}
        (kept, _), (again, _) = rows["kept"], rows["read again"]
        turn = {"prompt": len(prompt), "cached": kept.cached, "same": kept.tokens == again.tokens}
        turns.append(turn | {name: milliseconds for name, (_, milliseconds) in rows.items()})
        history.append({"role": "assistant", "content": decode_row(target.tokenizer, again.tokens)})
    return turns


@one_sentence_errors
def main() -> None:
    args = arguments()
    questions = load_benchmark("prompts", args.prompts, turns=1, bad="skip", limit=args.chats * args.turns).questions
    if len(questions) < args.chats * args.turns:
        raise ValueError(f"{args.prompts} has {len(questions)} prompts, and --chats times --turns are more")
    target, engines = load_target(args.target), {}
    for name, kept in WAYS.items():
        engines[name] = Engine(target, load_drafter(args.draft, target), Chain(4), prefixes=kept)
        engines[name].reserve(1, min(ROOM, target.config.context), part=256)
    asked = [question.turns[0] for question in questions]
    play(engines, asked[:2], 8, flip=False)  # nothing that is made once counts
    chats = [play(engines, asked[i :: args.chats], args.max_new_tokens, bool(i % 2)) for i in range(args.chats)]
    lines = ["| turn | prompt | of it kept | ms, read again | ms, kept | ratio |", "|---" * 6 + "|"]
    for turn, of in enumerate(zip(*chats, strict=True), 1):
        prompt, cached, again, kept = (statistics.median(x[name] for x in of) for name in ("prompt", "cached", *WAYS))
        lines.append(f"| {turn} | {prompt:.0f} | {cached:.0f} | {again:.0f} | {kept:.0f} | {again / kept:.2f} |")
    result = provenance(target.device) | {"chats": chats, "same": all(x["same"] for chat in chats for x in chat)}
    print("\n".join(lines))
    if args.out is not None:
        write_json(args.out, result)
    print(json.dumps({name: value for name, value in result.items() if name != "chats"}))
    sys.exit(not result["same"])


if __name__ == "__main__":
    main()
