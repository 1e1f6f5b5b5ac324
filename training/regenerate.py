"""Let the target answer the prompts of a data set, so that a drafter learns what the target itself would say.

    specdec data regenerate --target T --prompts conversations.jsonl --out answers.jsonl
    specdec data regenerate --server URL --target T --prompts conversations.jsonl --out answers.jsonl

With --server a server with OpenAI's interface answers (vLLM, SGLang or `specdec serve`), however large it is and
on however many GPUs. Of T only the tokenizer is read, and the server gets token ids.
It writes JSON lines in OpenAI form, or `{"text": prompt + answer}` for plain texts. Each answer has its `tokens`, which
training learns, and its `finish_reason`: `stop`, or `length` where --max-new-tokens cut it off.
After an interruption of any kind the same command continues, and ends with the same bytes as a run that was
not interrupted.
"""

import argparse
import hashlib
import itertools
import json
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

from tqdm import tqdm

from specdec.api import DEMO_TARGET, ModelSettings
from specdec.cli.lock import only_writer
from specdec.cli.parser import read_flags
from specdec.engine.engine import Engine
from specdec.machine import matmul_precision
from specdec.model.language_model import LanguageModel
from specdec.model.loader import load_texts
from specdec.remote import Remote, in_order, seed_of
from specdec.structs import Sampling
from specdec.text import read_prompts, writes_date
from specdec.training.data import Conversation, Message, Record, Tally, preset, read_messages, read_records
from specdec.training.data.dialogues import Answer, Dialogues, Prompt, cut_off, encode
from specdec.training.data.shards import Shards, begun_on, record_of

CONTINUED = (
    "the lines of a .txt file are continued as text, without the chat template; for questions that are answered in a "
    'chat give .jsonl, each line {"prompt": "..."}'
)
CUT = "answers cut off by --max-new-tokens: their end is not learnt"


def records_of(name: str, split: str | None) -> Iterator[Record]:
    """The records of a source as the command line names it. Each line of a .txt file is a record."""
    if name.endswith(".txt"):
        return (Record(f"{name} prompt {n}", {"text": line}) for n, line in enumerate(read_prompts(Path(name)), 1))
    return read_records(**cast(Any, preset(name) | ({"split": split} if split else {})))


def prompts_of(
    target: LanguageModel, records: Iterable[Record], tally: Tally, turns: str = "first", day: str | None = None
) -> Iterator[Prompt]:
    """Yield the messages before the assistant's first answer in each record, if they take at most half of the context.

    With `turns` 'all', a prompt includes the messages before each later answer.
    """
    longest = target.config.context // 2
    for where, messages in read_messages(records, target.tokenizer, tally):
        asked: list[list[Message]] = [[]]
        for message in messages:
            if message["role"] != "assistant":
                asked[-1].append(message)
            elif asked[-1]:
                asked.append([])
        if not asked[0] or messages[0]["role"] == "assistant":
            tally.count("conversations that begin with an answer left out")
            continue
        before = Conversation(asked[0], messages.tools)
        prompt = Prompt([], before, later=tuple(filter(None, asked[1:])) if turns == "all" else ())
        with tally.record(where):
            prompt.ids = encode(target, before, day)
        if len(prompt.ids) > longest:
            tally.count(f"prompts of more than {longest} tokens left out")
        elif prompt.ids:
            yield prompt


def plan(prompts: list[Prompt], batch_size: int, seed: int) -> list[list[Prompt]]:
    """Number the prompts, and return batches of similar lengths, in random order: any part is a fair sample of all."""
    if batch_size < 1:
        raise ValueError(f"the batch size must be at least 1, got {batch_size}")
    if not prompts:
        raise ValueError("there is no prompt to answer")
    numbered = [replace(prompt, number=number) for number, prompt in enumerate(prompts)]
    ordered = sorted(numbered, key=lambda prompt: len(prompt.ids))
    batches = [ordered[i : i + batch_size] for i in range(0, len(ordered), batch_size)]
    random.Random(seed).shuffle(batches)
    return batches


def digest(batches: list[list[Prompt]]) -> str:
    """Return a short hash of the prompts' token ids."""
    return hashlib.sha256(json.dumps([[p.ids for p in batch] for batch in batches]).encode()).hexdigest()[:16]


def regenerate(
    target: LanguageModel,
    prompts: list[Prompt],
    out: Path,
    *,
    max_new_tokens: int,
    batch_size: int,
    sampling: Sampling,
    seed: int,
    day: str | None = None,
    **files: int | None,
) -> list[Path]:
    """Answer the prompts in batches, and write the answers into `out` (see `Shards`). Returns the files.

    Prompt number i has the seed (seed, i), and a batch that was cut off is answered again. So an answer depends on no
    other prompt, and not on where a run was interrupted. The order of the answers does depend on batch_size, which must
    be the same to continue, as all settings must; and floating-point sums depend on it and on the machine, by rounding.

    files: see `_write`. Raises ValueError without prompts, and if `out` was begun with other settings.
    """
    batches, engine = plan(prompts, batch_size, seed), Engine(target)
    settings = {"target": target.name, "dtype": str(target.dtype), "max_new_tokens": max_new_tokens}
    settings["matmul_precision"] = matmul_precision(target.device)
    settings |= asdict(sampling) | {"batch_size": batch_size, "seed": seed}

    def rows_of(batch: list[Prompt]) -> list[dict]:
        talks = Dialogues(target, batch, day)
        while talks.going:
            seeds = [(seed, batch[i].number + talks.turn * len(prompts)) for i in talks.going]
            ids = [talks.ids[i] for i in talks.going]
            result = engine.generate(ids, max_new_tokens=max_new_tokens, sampling=sampling, seed=seeds)
            texts = [target.tokenizer.decode(row.tokens, skip_special_tokens=True) for row in result.rows]
            reasons = ["length" if row.finish == "length" else "stop" for row in result.rows]
            talks.add([Answer(t, r.tokens, why) for t, r, why in zip(texts, result.rows, reasons, strict=True)])
        return list(talks.rows())

    def answers(done: int, last: int) -> Iterator[list[dict]]:
        for start, batch in zip(itertools.accumulate(map(len, batches), initial=0), batches, strict=False):
            if start + len(batch) > done and start < last:
                yield rows_of(batch)[max(done - start, 0) : last - start]

    return _write(out, batches, settings, answers, day, **files)


def regenerate_remotely(
    server: Remote,
    target: LanguageModel,
    prompts: list[Prompt],
    out: Path,
    *,
    max_new_tokens: int,
    requests: int,
    sampling: Sampling,
    seed: int,
    day: str | None = None,
    **files: int | None,
) -> list[Path]:
    """The same by a server, so many `requests` at once. A server of another model or version does not continue a file.

    The seed of prompt i follows from (seed, i): an answer does not depend on where a run was interrupted, if the
    server's texts do not depend on its other requests.
    """
    batches = plan(prompts, 1, seed)
    settings = {"server_model": server.model, "server_version": server.version, "max_new_tokens": max_new_tokens}
    settings |= asdict(sampling) | {"seed": seed}

    def answer(prompt: Prompt) -> dict:
        talks = Dialogues(target, [prompt], day)
        while talks.going:
            its = seed_of(seed, prompt.number + talks.turn * len(prompts))
            said = server.complete(talks.ids[0], max_new_tokens, sampling, its)
            server.check_ids(said, target.vocab)
            text = said.text
            if said.tokens is not None:
                text = target.tokenizer.decode(said.tokens, skip_special_tokens=True)
            talks.add([Answer(text, said.tokens, said.finish)])
        return next(talks.rows())

    def answers(done: int, last: int) -> Iterator[list[dict]]:
        return ([row] for row in in_order(answer, [prompt for (prompt,) in batches[done:last]], requests))

    return _write(out, batches, settings, answers, day, **files)


def _write(
    out: Path,
    batches: list[list[Prompt]],
    settings: dict,
    answers: Callable[[int, int], Iterator[list[dict]]],
    day: str | None,
    shard_size: int | None = None,
    only: int | None = None,
) -> list[Path]:
    """Write the rows that `answers` yields, and return the files. only: the number of the only file to write."""
    count, settings = sum(map(len, batches)), settings | {"prompts_digest": digest(batches)}
    settings |= {"day": day} if day else {}
    tally = Tally()
    with (
        Shards(out, count, shard_size, settings, only) as shards,
        tqdm(total=shards.last, initial=shards.done, desc="answers") as bar,
    ):
        for rows in answers(shards.done, shards.last):
            shards.write(rows)
            bar.update(len(rows))
            tally.count(CUT, sum(map(cut_off, rows)))
        tally.report()
        return [shards.path(shard) for shard in range(shards.first, shards.end)]


def run(args: argparse.Namespace) -> None:
    """Regenerate the answers for the parsed flags of `specdec data regenerate`."""
    sampling, part = read_flags(Sampling, args), args.part
    mine = args.out if part is None else args.out.with_name(f"{args.out.stem}.part-{part[0]}-of-{part[1]}")
    with only_writer(mine):
        answer_all(args, sampling, part)


def answer_all(args: argparse.Namespace, sampling: Sampling, part: tuple[int, int] | None = None) -> None:
    """Read the prompts, and write their answers to --out, which is locked meanwhile.

    `part` (2, 4) is the third of 4 jobs, which take the files in turn. Without --shard-size each job has one file.
    """
    server = Remote(args.server, args.served_model_name) if args.server is not None else None
    target: Any = load_texts(args.target or DEMO_TARGET) if server else read_flags(ModelSettings, args).load_target()
    if args.prompts.endswith(".txt") and getattr(target.tokenizer, "chat_template", None):
        print(f"note: {args.prompts}: {CONTINUED}", file=sys.stderr)
    tally, record = Tally(args.bad), record_of(args.out)
    day = begun_on(record, today=True) if writes_date(target.tokenizer) else None
    found = prompts_of(target, records_of(args.prompts, args.split), tally, args.turns, day)
    prompts = list(itertools.islice(found, args.limit))
    tally.report()
    prompts *= args.samples
    how: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "sampling": sampling, "seed": args.seed, "day": day}
    number, parts = part or (0, 1)
    how["shard_size"] = args.shard_size or (-(-len(prompts) // parts) or None if part else None)
    count = -(-len(prompts) // how["shard_size"]) if part and prompts else 0
    files: list[Path] = []
    for only in range(number, count, parts) if part else [None]:
        if server is None:
            files += regenerate(target, prompts, args.out, batch_size=args.batch_size, only=only, **how)
        else:
            how |= {"requests": args.requests, "only": only}
            files += regenerate_remotely(server, target, prompts, args.out, **how)
    said = f" to {files[-1]}" if len(files) > 1 else ""
    print(
        f"answers of part {number} of {parts} in {files[0]}{said}"
        if part and files
        else f"{len(prompts)} answers in {files[0]}{said}"
        if files
        else f"part {number} of {parts} has no file to write"
    )
