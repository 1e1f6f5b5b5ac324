"""Let the target answer the prompts of a data set, so that a drafter learns what the target would say itself.

    python -m training.regenerate --target T --prompts conversations.jsonl --out answers.jsonl

Writes JSON lines in OpenAI form, or `{"text": prompt + answer}` for a target without a chat template.
"""

import argparse
import itertools
import json
import os
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

from tqdm import tqdm

from specdec.api import DEMO_TARGET
from specdec.cli import one_sentence_errors
from specdec.engine import Engine
from specdec.loader import load_target
from specdec.model import Target
from specdec.text import encode_chat, read_prompts
from specdec.types import Sampling
from training.data import Message, read_conversations


def prompts_of(path: Path) -> Iterator[list[Message]]:
    """What stands before the assistant's first answer in each conversation; or each line of a text file."""
    if path.suffix == ".txt":
        yield from ([{"role": "text", "content": line}] for line in read_prompts(path))
        return
    for messages in read_conversations(path):
        before = list(itertools.takewhile(lambda m: m["role"] != "assistant", messages))
        if before:
            yield before


def encode(target: Target, messages: list[Message]) -> list[int]:
    if messages[0]["role"] == "text":
        return target.tokenizer(messages[0]["content"])["input_ids"]
    return encode_chat(target, messages)


def answer_row(messages: list[Message], answer: str) -> dict:
    if messages[0]["role"] == "text":
        return {"text": messages[0]["content"] + answer}
    return {"messages": [*messages, {"role": "assistant", "content": answer}]}


def regenerate(
    target: Target,
    prompts: Iterable[list[Message]],
    *,
    max_new_tokens: int,
    batch_size: int,
    sampling: Sampling,
    seed: int,
    show_progress: bool = True,
) -> Iterator[dict]:
    """Answer prompts in batches of similar lengths; yields data rows. Prompts above half the context are left out."""
    encoded = [(encode(target, messages), messages) for messages in prompts]
    encoded = [(ids, messages) for ids, messages in encoded if 0 < len(ids) <= target.config.context // 2]
    encoded.sort(key=lambda pair: len(pair[0]))
    batches = [encoded[i : i + batch_size] for i in range(0, len(encoded), batch_size)]
    random.Random(seed).shuffle(batches)  # so that a part of the output is a fair sample of it
    engine = Engine(target)
    with tqdm(total=len(encoded), desc="answers", disable=not show_progress) as bar:
        for number, batch in enumerate(batches):
            result = engine.generate(
                [ids for ids, _ in batch], max_new_tokens=max_new_tokens, sampling=sampling, seed=seed + number
            )
            for (_, messages), row in zip(batch, result.rows, strict=True):
                yield answer_row(messages, target.tokenizer.decode(row.tokens, skip_special_tokens=True))
            bar.update(len(batch))


def write_rows(rows: Iterable[dict], out: Path) -> int:
    """Write JSON lines, whole or not at all; returns their number."""
    aside = out.with_name(out.name + ".partial")
    count = 0
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                count += 1
        os.replace(aside, out)
    except OSError as error:
        raise ValueError(f"cannot write {out}: {error.strerror}") from None
    return count


@one_sentence_errors
def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(prog="python -m training.regenerate", description=__doc__.split("\n")[0])
    p.add_argument("--target", default=DEMO_TARGET, help="folder or hub name (default: the bundled demo)")
    p.add_argument(
        "--prompts", type=Path, required=True, help="conversations (.json, .jsonl, .jsonl.xz) or lines (.txt)"
    )
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--limit", type=int, help="answer this many prompts only")
    p.add_argument("--samples", type=int, default=1, help="answers per prompt")
    p.add_argument("--max-new-tokens", type=int, default=256)
    p.add_argument("--batch-size", type=int, default=64)
    p.add_argument("--temperature", type=float, default=0.0)
    p.add_argument("--dtype", default="auto")
    p.add_argument("--device", default="cpu")
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args(argv)
    sampling = Sampling(args.temperature)
    target = load_target(args.target, dtype=args.dtype, device=args.device)
    prompts = list(itertools.islice(prompts_of(args.prompts), args.limit)) * args.samples
    rows = regenerate(
        target,
        prompts,
        max_new_tokens=args.max_new_tokens,
        batch_size=args.batch_size,
        sampling=sampling,
        seed=args.seed,
    )
    print(f"{write_rows(rows, args.out)} answers in {args.out}")


if __name__ == "__main__":
    main()
