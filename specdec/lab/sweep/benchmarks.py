"""Benchmarks: questions of one turn or more, from files and data sets.

Known forms of a record, in this order: `turns` (MT-bench, Spec-Bench, EAGLE's sets); the fields that the format string
`form` names (GSM8K, HumanEval, Alpaca, CNN/DM); `prompt` (a text, or a list of turns); `messages` (OpenAI) and
`conversations` (ShareGPT), whose answers are left out: the target gives its own.
"""

import hashlib
import json
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from specdec.text import clean
from specdec.training.data.sources import Record, read_records

IDS = ("question_id", "prompt_id", "task_id", "id")


@dataclass(frozen=True)
class Question:
    id: str
    category: str | None
    turns: tuple[str, ...]  # what the user says, one after the other
    system: str | None = None


@dataclass(frozen=True)
class Benchmark:
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
    that hold none. category: of records that name none. turns: the most turns that are kept of a question. bad: a
    record that cannot be used is an 'error', or it is left out and counted ('skip'). limit: how many questions to take;
    pick: take them 'spread' evenly over the set, or the 'first'.

    Raises ValueError for what cannot be read, and for settings that make no sense.
    """
    if not path:
        raise ValueError(
            f"the benchmark {name} has no path: give benchmark.path=FILE (or a data set of the hub), or the name of a "
            "benchmark that is on the hub, such as benchmark=mt_bench"
        )
    for key, value in (("limit", limit), ("turns", turns)):
        if value is not None and value < 1:
            raise ValueError(f"benchmark.{key} must be at least 1, got {value}")
    for key, value, known in (("bad", bad, ("error", "skip")), ("pick", pick, ("spread", "first"))):
        if value not in known:
            raise ValueError(f"benchmark.{key} must be {known[0]} or {known[1]}, got {value!r}")
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
    if limit is not None and limit < len(questions):
        questions = [questions[i * len(questions) // limit] for i in range(limit)]
    return Benchmark(name, _with_own_ids(questions), skipped)


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
    if fields and all(isinstance(row.get(name), str) for name in fields):
        return [form.format_map(row).strip()], None
    prompt = row.get("prompt")
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


def _with_own_ids(questions: list[Question]) -> list[Question]:
    """The questions with ids that occur once each, because intervals resample questions by id."""
    seen: Counter[str] = Counter()
    for number, q in enumerate(questions):
        seen[q.id] += 1
        if seen[q.id] > 1:
            questions[number] = replace(q, id=f"{q.id} ({seen[q.id]})")
    return questions
