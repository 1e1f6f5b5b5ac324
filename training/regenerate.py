"""Let the target answer the prompts of a data set, so that a drafter learns what the target itself would say.

    specdec data regenerate --target T --prompts conversations.jsonl --out answers.jsonl
    specdec data regenerate --server URL --target T --prompts conversations.jsonl --out answers.jsonl

With --server a server with OpenAI's interface answers (vLLM, SGLang or `specdec serve`), however large it is and
on however many GPUs. Of T only the tokenizer is read, and the server gets token ids.
It writes JSON lines in OpenAI form, or `{"text": prompt + answer}` for plain texts. Each answer has its `tokens`, which
training learns, and its `finish_reason`: `stop`, or `length` where --max-new-tokens or the context cut it off.
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
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from tqdm import tqdm

from specdec.api import DEMO_TARGET, ModelSettings
from specdec.cli.lock import only_writer
from specdec.cli.parser import read_flags
from specdec.engine.engine import Engine
from specdec.engine.sequence import REASONS
from specdec.machine import matmul_precision
from specdec.model.language_model import LanguageModel
from specdec.model.loader import load_texts
from specdec.remote import Remote, in_order, seed_of
from specdec.structs import Sampling
from specdec.text import encode_chat, read_prompts, writes_date
from specdec.training.data import Conversation, Message, Record, Tally, preset, read_messages, read_records
from specdec.training.data.shards import Shards, begun_on, record_of

CONTINUED = (
    "the lines of a .txt file are continued as text, without the chat template; for questions that are answered in a "
    'chat give .jsonl, each line {"prompt": "..."}'
)
CUT = "answers cut off by --max-new-tokens or the target's context: their end is not learnt"


@dataclass
class Prompt:
    """A conversation to answer. `ids` is the first prompt in it."""

    ids: list[int]
    messages: Conversation  # up to the first answer
    number: int = 0  # among all prompts, by which it is seeded
    later: tuple[list[Message], ...] = ()  # the messages before each of the following answers


@dataclass
class Answer:
    """What the target has said."""

    text: str
    tokens: list[int] | None  # None: the server does not return them
    reason: str  # stop or length

    def fields(self) -> dict:
        """Return the fields of an answer in a row of the file: `tokens`, if known, and `finish_reason`."""
        return ({"tokens": self.tokens} if self.tokens else {}) | {"finish_reason": self.reason}


def encode(target: LanguageModel, messages: Conversation, day: str | None = None) -> list[int]:
    """Return the token ids of a plain text, or of a conversation in the target's chat template."""
    if messages[0]["role"] == "text":
        return target.tokenizer(messages[0]["content"])["input_ids"]
    return encode_chat(target, messages, messages.tools, day)


class Dialogue:
    """A conversation with the target, a turn at a time: a prompt in, a row of the file out."""

    def __init__(self, prompt: Prompt):
        """Begin with the first prompt; `ids` is always the prompt of the next answer."""
        self.prompt, self.ids, self.later = prompt, prompt.ids, list(prompt.later)
        self.messages = Conversation(prompt.messages, prompt.messages.tools)

    def add(self, answer: Answer, target: LanguageModel, day: str | None) -> bool:
        """Add an answer. Return whether there is another turn, as there is none after an answer that was cut off."""
        self.last = answer
        self.messages.append({"role": "assistant", "content": answer.text} | answer.fields())
        if not self.later or answer.reason == "length":
            return False
        more = Conversation([*self.messages, *self.later.pop(0)], self.messages.tools)
        self.ids = encode(target, more, day)
        fits = len(self.ids) <= target.config.context // 2
        self.messages = more if fits else self.messages
        return fits

    def row(self, tokenizer) -> dict:
        """Return the row of the output file."""
        if self.messages[0]["role"] != "text":
            return {"messages": list(self.messages)} | ({"tools": self.messages.tools} if self.messages.tools else {})
        whole = replace(self.last, tokens=self.last.tokens and [*self.prompt.ids, *self.last.tokens])
        return {"text": self.messages[0]["content"] + self._continued(tokenizer)} | whole.fields()

    def _continued(self, tokenizer) -> str:
        """Return the text of the answer to a plain text. Decoded alone, it may lack the space before its first word."""
        ids, tokens = self.prompt.ids, self.last.tokens or []
        before, whole = (tokenizer.decode(part, skip_special_tokens=True) for part in (ids, [*ids, *tokens]))
        return whole[len(before) :] if tokens and whole.startswith(before) else self.last.text


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


def converse(
    batch: list[Prompt], turn: Callable[..., list[Answer]], target: LanguageModel, day: str | None, shift: int
) -> list[dict]:
    """Return the rows of a batch of prompts. Turn t of prompt i is answered by `turn` with the number i + t * shift."""
    talks = [Dialogue(prompt) for prompt in batch]
    going, before = talks, 0
    while going:
        answers = turn([talk.ids for talk in going], [talk.prompt.number + before for talk in going])
        going = [talk for talk, answer in zip(going, answers, strict=True) if talk.add(answer, target, day)]
        before += shift
    return [talk.row(target.tokenizer) for talk in talks]


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
    server: Remote | None = None,
    requests: int = 1,
    shard_size: int | None = None,
    only: int | None = None,
) -> list[Path]:
    """Answer the prompts in batches, or one by one by a server with so many `requests` at once. Returns the files.

    Prompt number i has a seed by (seed, i), and a batch that was cut off is answered again. So an answer depends on no
    other prompt, and not on where a run was interrupted, if those of a server do not. The order of the answers depends
    on batch_size, and rounding on batch_size and the machine. shard_size, only: see `Shards`.
    """
    batches = plan(prompts, batch_size if server is None else 1, seed)
    engine: Any = Engine(target) if server is None else None

    def turn(ids: list[list[int]], numbers: list[int]) -> list[Answer]:
        decode = partial(target.tokenizer.decode, skip_special_tokens=True)
        if server is None:
            seeds = [(seed, number) for number in numbers]
            found = engine.generate(ids, max_new_tokens=max_new_tokens, sampling=sampling, seed=seeds).rows
            return [Answer(decode(row.tokens), row.tokens, REASONS.get(row.finish, row.finish)) for row in found]
        one = server.complete(ids[0], max_new_tokens, sampling, seed_of(seed, numbers[0]))
        server.check_ids(one, target.vocab)
        return [Answer(one.text if one.tokens is None else decode(one.tokens), one.tokens, one.finish or "")]

    answered = partial(converse, turn=turn, target=target, day=day, shift=len(prompts))
    settings = _settings(target, server, max_new_tokens, sampling, batch_size, seed)
    settings |= {"prompts_digest": digest(batches)} | ({"day": day} if day else {})
    tally = Tally()
    with (
        Shards(out, len(prompts), shard_size, settings, only) as shards,
        tqdm(total=shards.last, initial=shards.done, desc="answers") as bar,
    ):
        begun, starts = shards.done, itertools.accumulate(map(len, batches), initial=0)
        due = {n: b for n, b in zip(starts, batches, strict=False) if max(n, begun) < min(n + len(b), shards.last)}
        answers = map(answered, due.values()) if server is None else in_order(answered, due.values(), requests)
        for start, rows in zip(due, answers, strict=True):
            rows = rows[max(begun - start, 0) : shards.last - start]
            shards.write(rows)
            bar.update(len(rows))
            said = (message for row in rows for message in row.get("messages", [row]))
            tally.count(CUT, sum(message.get("finish_reason") == "length" for message in said))
        tally.report()
        return [shards.path(shard) for shard in range(shards.first, shards.end)]


def _settings(
    target: LanguageModel, server: Remote | None, new: int, sampling: Sampling, batch_size: int, seed: int
) -> dict[str, Any]:
    """What must be the same to continue a file."""
    if server is not None:
        made_by = {"server_model": server.model, "server_version": server.version, "max_new_tokens": new}
        return made_by | asdict(sampling) | {"seed": seed}
    made_here = {"target": target.name, "dtype": str(target.dtype), "max_new_tokens": new}
    made_here["matmul_precision"] = matmul_precision(target.device)
    return made_here | asdict(sampling) | {"batch_size": batch_size, "seed": seed}


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
    how |= {"batch_size": args.batch_size, "server": server, "requests": args.requests}
    number, parts = part or (0, 1)
    how["shard_size"] = args.shard_size or (-(-len(prompts) // parts) or None if part else None)
    count = -(-len(prompts) // how["shard_size"]) if part and prompts else 0
    numbers = range(number, count, parts) if part else [None]
    files = [str(file) for only in numbers for file in regenerate(target, prompts, args.out, only=only, **how)]
    what = f"answers of part {number} of {parts}" if part else f"{len(prompts)} answers"
    print(f"{what} in {' to '.join(dict.fromkeys(files[:1] + files[-1:]))}" if files else f"{what}: no file to write")
