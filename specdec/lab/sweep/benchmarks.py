"""Benchmarks: questions of one turn or more, from files and data sets, and the conversations that a target has on them.

Known forms of a record, in this order: `turns` (MT-bench, Spec-Bench, EAGLE's sets); the fields that the format string
`form` names (GSM8K, HumanEval, Alpaca, CNN/DM); `prompt` (a text, or a list of turns); `messages` (OpenAI) and
`conversations` (ShareGPT), whose answers are left out: the target gives its own.
"""

import hashlib
import json
import string
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from specdec.engine.engine import Engine, Result
from specdec.model.language_model import LanguageModel
from specdec.structs import Sampling
from specdec.text import clean, encode_chat
from specdec.training.data.sources import Record, read_records

IDS = ("question_id", "prompt_id", "task_id", "id")
TURN_BREAK = "\n\n"  # between an answer and the next turn where there is no chat template


@dataclass(frozen=True)
class Question:
    """A benchmark question of one or more turns."""

    id: str
    category: str | None
    turns: tuple[str, ...]  # what the user says, one after the other
    system: str | None = None


@dataclass(frozen=True)
class Benchmark:
    """The questions of a benchmark."""

    name: str
    questions: list[Question]
    skipped: int = 0  # records that could not be used

    def digest(self) -> str:
        """A digest of the questions, whatever the benchmark is called."""
        return hashlib.sha256(json.dumps([asdict(q) for q in self.questions]).encode()).hexdigest()[:16]


def load_benchmark(
    name: str,
    path: str | None,
    *,
    split: str | None = None,
    subset: str | None = None,
    streaming: bool = False,
    form: str | None = None,
    category: str | None = None,
    turns: int | None = None,
    bad: str = "error",
    limit: int | None = None,
    pick: str = "spread",
) -> Benchmark:
    """Read a benchmark; path, split, subset and streaming as `specdec.training.data.read_records` takes them.

    form: a format string over a record's fields, such as "{instruction} {input}", that makes a question of records
    that hold none. category: of records that name none. turns: the most turns of a question. bad: a record that cannot
    be used is an 'error', or it is left out and counted ('skip'). limit: how many questions to take; pick: take them
    'spread' evenly over the set, or the 'first'. Raises ValueError for what cannot be read, and for wrong settings.
    """
    if not path:
        raise ValueError(
            f"the benchmark {name} has no path: give benchmark.path=FILE (or a data set of the hub), or the name of a "
            "benchmark that is on the hub, such as benchmark=mt_bench"
        )
    for key, value in (("limit", limit), ("turns", turns)):
        if value is not None and value < 1:
            raise ValueError(f"benchmark.{key} must be at least 1, got {value}")
    for key, word, known in (("bad", bad, ("error", "skip")), ("pick", pick, ("spread", "first"))):
        if word not in known:
            raise ValueError(f"benchmark.{key} must be {known[0]} or {known[1]}, got {word!r}")
    _fields_of(form)
    records = read_records(path, split=split, subset=subset, streaming=streaming)
    questions, skipped = [], 0
    for number, record in enumerate(records):
        try:
            questions.append(_question(record, str(number), form, category, turns))
        except ValueError as error:
            if bad == "error":
                raise ValueError(
                    f"{record.where}: {error}; benchmark.bad=skip leaves such records out and counts them"
                ) from None
            skipped += 1
        if pick == "first" and len(questions) == limit:
            break  # no more of the source is read
    if not questions:
        raise ValueError(f"{path} holds no question that can be used: {skipped} records were skipped")
    return Benchmark(name, list(_with_own_ids(spread(questions, limit))), skipped)


def spread(questions: list[Question], count: int | None) -> list[Question]:
    """Return so many of the questions, spread evenly over them; all of them if there are no more, or for None."""
    count = len(questions) if count is None else min(count, len(questions))
    return [questions[i * len(questions) // count] for i in range(count)]


def _question(record: Record, number: str, form: str | None, category: str | None, limit: int | None) -> Question:
    row = record.fields()
    turns, system = _turns(row, form, record)
    turns = tuple(clean(turn) for turn in turns[:limit])
    if not turns or not all(turn.strip() for turn in turns):
        raise ValueError("a turn of the question is empty")
    name = next((row[key] for key in IDS if row.get(key) is not None), number)
    return Question(str(name), str(row.get("category") or category or "") or None, turns, system)


def _turns(row: dict, form: str | None, record: Record) -> tuple[Sequence[str], str | None]:
    """The user's turns, and the system's message if there is one."""
    if _texts(row.get("turns")):
        return row["turns"], None
    fields = _fields_of(form)
    if form is not None and fields and all(isinstance(row.get(name), str) for name in fields):
        return [form.format_map(row).strip()], None
    prompt: Any = row.get("prompt")
    if isinstance(prompt, str) or _texts(prompt):
        return [prompt] if isinstance(prompt, str) else prompt, None
    if "conversations" in row or "messages" in row:
        messages = record.messages()
        system = next((m["content"] for m in messages if m["role"] == "system"), None)
        return [m["content"] for m in messages if m["role"] == "user"], system
    wanted = f", nor the fields of benchmark.form: {', '.join(fields)}" if fields else "; say with benchmark.form how"
    raise ValueError(f"no question: neither 'turns', 'prompt', 'messages' nor 'conversations'{wanted}")


def _fields_of(form: str | None) -> list[str]:
    try:
        return [name for _, name, _, _ in string.Formatter().parse(form or "") if name]
    except ValueError as error:
        raise ValueError(f"benchmark.form={form!r} is no format string: {error}") from None


def _texts(value) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(turn, str) for turn in value)


def _with_own_ids(questions: list[Question]) -> Iterator[Question]:
    """The questions with ids that occur once each, because intervals resample questions by id."""
    seen: Counter[str] = Counter()
    for q in questions:
        seen[q.id] += 1
        yield replace(q, id=f"{q.id} ({seen[q.id]})") if seen[q.id] > 1 else q


@dataclass(eq=False)
class Dialogue:
    """One question while it is answered, in the target's chat template, or raw: turns and answers as one text."""

    target: LanguageModel
    question: Question
    raw: bool
    template: dict  # further variables of the chat template
    number: int  # of the question
    messages: list[dict[str, str]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)  # raw: the text so far

    def ask(self) -> list[int]:
        """The ids of a prompt that ends with the next turn and holds everything before."""
        turn, first = self.question.turns[self.asked], not self.messages
        new = [{"role": "system", "content": self.question.system}] if first and self.question.system else []
        new.append({"role": "user", "content": turn})
        self.messages += new
        if not self.raw:
            return encode_chat(self.target, self.messages, **self.template)
        text = ("" if first else TURN_BREAK) + TURN_BREAK.join(message["content"] for message in new)
        self.ids = self.ids + self.target.tokenizer(text, add_special_tokens=first)["input_ids"]
        return self.ids

    def hear(self, tokens: list[int]) -> None:
        """Take in the target's answer. tokens: with its end-of-text token."""
        if self.raw:
            self.ids = self.ids + [t for t in tokens if t not in self.target.eos]
        text = self.target.tokenizer.decode(tokens, skip_special_tokens=True)
        self.messages.append({"role": "assistant", "content": text})

    @property
    def asked(self) -> int:
        """The number of turns asked so far."""
        return sum(m["role"] == "user" for m in self.messages)


def template_settings(target: LanguageModel, raw: bool, thinking: bool | None) -> tuple[bool, dict]:
    """(raw, variables of the chat template). Raises ValueError for thinking if the template has no switch for it."""
    template = target.tokenizer.chat_template
    raw = raw or not template
    if thinking is None:
        return raw, {}
    if raw or "enable_thinking" not in str(template):
        why = "the prompts are raw" if raw else "the target's chat template has no switch enable_thinking"
        raise ValueError(f"thinking was set, but {why}: leave thinking=null")
    return raw, {"enable_thinking": thinking}


def converse(
    engine: Engine,
    questions: list[Question],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int = 0,
    batch_size: int = 1,
    raw: bool = False,
    template: dict | None = None,
    name: Callable[[list[str], list[str | None]], None] = lambda ids, categories: None,
    observer: Callable | None = None,
) -> tuple[list[Result], int]:
    """Hold every conversation: a turn's prompt holds the turns before it with the target's own answers.

    `batch_size` questions are decoded together, turn by turn. A conversation ends early where its next prompt and
    max_new_tokens do not fit into the target's context. name: called with the questions before each call of the engine
    (`Recorder.name`). Conversation number i has the seed (seed, i).

    Returns the engine's results in order, and the number of turns that were left out.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    results, left_out = [], 0
    for first in range(0, len(questions), batch_size):
        batch = enumerate(questions[first : first + batch_size], first)
        dialogues = [Dialogue(engine.target, question, raw, template or {}, number) for number, question in batch]
        while dialogues:
            prompts = [(d, d.ask()) for d in dialogues]
            fitting = [(d, ids) for d, ids in prompts if len(ids) + max_new_tokens <= engine.target.config.context]
            dialogues = [d for d, _ in fitting]
            left_out += sum(1 + len(d.question.turns) - d.asked for d, _ in prompts if d not in dialogues)
            if not fitting:
                break
            name([d.question.id for d in dialogues], [d.question.category for d in dialogues])
            how: dict[str, Any] = {"max_new_tokens": max_new_tokens, "sampling": sampling, "observer": observer}
            result = engine.generate([ids for _, ids in fitting], seed=[(seed, d.number) for d in dialogues], **how)
            results.append(result)
            for dialogue, row in zip(dialogues, result.rows, strict=True):
                dialogue.hear(row.tokens)
            dialogues = [d for d in dialogues if d.asked < len(d.question.turns)]
    return results, left_out
