"""Let the target answer the prompts of a data set, so that a drafter learns what the target would say itself.

    python -m training.regenerate --target T --prompts conversations.jsonl --out answers.jsonl

Writes JSON lines in OpenAI form, or `{"text": prompt + answer}` for plain texts. However it was interrupted, the same
command goes on where it was, and ends with the same bytes as a run that was not.
"""

import argparse
import hashlib
import itertools
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from specdec.api import DEMO_TARGET
from specdec.cli.errors import one_sentence_errors
from specdec.engine.engine import Engine
from specdec.model.loader import load_target
from specdec.model.target import Target
from specdec.text import encode_chat, read_prompts
from specdec.types import Sampling
from training.data import Message, Record, Tally, preset, read_messages, read_records
from training.data.shards import Shards


@dataclass
class Prompt:
    ids: list[int]
    messages: list[Message]


def encode(target: Target, messages: list[Message]) -> Prompt:
    if messages[0]["role"] == "text":
        return Prompt(target.tokenizer(messages[0]["content"])["input_ids"], messages)
    return Prompt(encode_chat(target, messages), messages)


def records_of(name: str, split: str | None) -> Iterator[Record]:
    """The records of a source as the command line names it; or each line of a text file."""
    if name.endswith(".txt"):
        lines = read_prompts(Path(name))
        return (Record(f"{name} prompt {number}", {"text": line}) for number, line in enumerate(lines, 1))
    return read_records(**preset(name) | ({"split": split} if split else {}))


def prompts_of(target: Target, records: Iterable[Record], tally: Tally) -> Iterator[Prompt]:
    """What stands before the assistant's first answer in each record, if it takes at most half the context."""
    longest = target.config.context // 2
    for where, messages in read_messages(records, target.tokenizer, tally):
        before = list(itertools.takewhile(lambda m: m["role"] != "assistant", messages))
        if not before:
            tally.count("conversations that begin with an answer left out")
            continue
        prompt = Prompt([], before)
        with tally.record(where):
            prompt = encode(target, before)
        if len(prompt.ids) > longest:
            tally.count(f"prompts of more than {longest} tokens left out")
        elif prompt.ids:
            yield prompt


def answer_row(messages: list[Message], answer: str) -> dict:
    if messages[0]["role"] == "text":
        return {"text": messages[0]["content"] + answer}
    return {"messages": [*messages, {"role": "assistant", "content": answer}]}


def plan(prompts: list[Prompt], batch_size: int, seed: int) -> list[list[Prompt]]:
    """Batches of similar lengths, in random order, so that a part of the output is a fair sample of it."""
    ordered = sorted(prompts, key=lambda prompt: len(prompt.ids))
    batches = [ordered[i : i + batch_size] for i in range(0, len(ordered), batch_size)]
    random.Random(seed).shuffle(batches)
    return batches


def digest(batches: list[list[Prompt]]) -> str:
    return hashlib.sha256(json.dumps([[p.ids for p in batch] for batch in batches]).encode()).hexdigest()[:16]


def regenerate(
    target: Target,
    prompts: list[Prompt],
    out: Path,
    *,
    max_new_tokens: int,
    batch_size: int,
    sampling: Sampling,
    seed: int,
    shard_size: int | None = None,
) -> list[Path]:
    """Answer the prompts, in batches, into `out` (see `Shards`); returns the files.

    Batch k draws from a generator of its own, seeded by seed + k, and a batch that was cut off is answered again: so
    what is written does not depend on where a run was interrupted. It does depend on batch_size, which, as all
    settings, must be the same to go on; and on the machine, as floating-point sums do.
    """
    if not prompts:
        raise ValueError("there is no prompt to answer")
    if batch_size < 1:
        raise ValueError(f"the batch size must be at least 1, got {batch_size}")
    batches = plan(prompts, batch_size, seed)
    settings = {"target": target.name, "dtype": str(target.dtype), "max_new_tokens": max_new_tokens}
    settings |= asdict(sampling) | {"batch_size": batch_size, "seed": seed, "prompts_digest": digest(batches)}
    engine = Engine(target)
    with (
        Shards(out, len(prompts), shard_size, settings) as shards,
        tqdm(total=len(prompts), initial=shards.done, desc="answers") as bar,
    ):
        end = 0
        for number, batch in enumerate(batches):
            end += len(batch)
            missing = end - shards.done
            if missing <= 0:
                continue
            result = engine.generate(
                [prompt.ids for prompt in batch], max_new_tokens=max_new_tokens, sampling=sampling, seed=seed + number
            )
            texts = [target.tokenizer.decode(row.tokens, skip_special_tokens=True) for row in result.rows]
            rows = [answer_row(prompt.messages, text) for prompt, text in zip(batch, texts, strict=True)]
            shards.write(rows[-missing:])
            bar.update(missing)
        return [shards.path(shard) for shard in range(shards.count)]


@one_sentence_errors
def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(prog="python -m training.regenerate", description=__doc__.split("\n")[0])
    p.add_argument("--target", default=DEMO_TARGET, help="folder or hub name (default: the bundled demo)")
    p.add_argument(
        "--prompts",
        required=True,
        help="conversations (.json, .jsonl, .jsonl.xz, .parquet), lines (.txt), a data set of the hub, or the name of "
        "a preset in conf/data",
    )
    p.add_argument("--split", help="of a data set")
    p.add_argument("--bad", choices=("error", "skip"), default="error", help="what a record that cannot be used does")
    p.add_argument("--out", type=Path, required=True, help="a .jsonl file")
    p.add_argument("--shard-size", type=int, help="answers per file (default: all in one)")
    p.add_argument("--limit", type=int, help="answer this many prompts only")
    p.add_argument("--samples", type=int, default=1, help="answers per prompt")
    p.add_argument("--max-new-tokens", type=int, default=256)
    p.add_argument("--batch-size", type=int, default=64)
    p.add_argument("--temperature", type=float, default=0.0)
    p.add_argument("--top-k", type=int, default=0)
    p.add_argument("--top-p", type=float, default=1.0)
    p.add_argument("--min-p", type=float, default=0.0)
    p.add_argument("--dtype", default="auto")
    p.add_argument("--device", default="cpu")
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args(argv)
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.min_p)
    if args.samples > 1 and sampling.greedy:
        raise ValueError(f"--samples {args.samples} needs a --temperature: greedy answers to a prompt are all the same")
    target = load_target(args.target, dtype=args.dtype, device=args.device)
    tally = Tally(args.bad)
    prompts = list(itertools.islice(prompts_of(target, records_of(args.prompts, args.split), tally), args.limit))
    tally.report()
    files = regenerate(
        target,
        prompts * args.samples,
        args.out,
        max_new_tokens=args.max_new_tokens,
        batch_size=args.batch_size,
        sampling=sampling,
        seed=args.seed,
        shard_size=args.shard_size,
    )
    print(f"{len(prompts) * args.samples} answers in {files[0]}" + (f" to {files[-1]}" if len(files) > 1 else ""))


if __name__ == "__main__":
    main()
