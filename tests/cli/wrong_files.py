"""More cases of `scripts/wrong_inputs.py`: files that commands read, each right but for one place.

Some of what stands there then is right too, so these may be taken, with exit code 0, as well as refused.
"""

import copy
import json
import struct
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import checkout  # noqa: F401
from wrong_cases import VALUES, Case, with_content

from specdec import registry
from specdec.api import DEMO_DRAFTER, DEMO_TARGET, generate, load_drafter, load_target
from specdec.engine.recorder import Recorder
from specdec.engine.trace_files import HEADER, write_trace

EITHER = (0, 2)
GONE = object()  # in the place of a value: the entry is taken away
ONE_TOKEN = ("--prompt", "x", "--max-new-tokens", "1")
RECORDS = {
    "ShareGPT": {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]},
    "OpenAI": {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]},
    "plain": {"text": "Hello."},
}
PROMPTS = {"question": {"question_id": 1, "category": "writing", "turns": ["Hi", "More"]}, "prompt": {"prompt": "Hi"}}
SETTINGS = {"topk": 2, "steps": 2, "num_draft_tokens": 4, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1,
            "repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1, "verifier": "match",
            "draft": "draft", "target": "target", "dtype": "fp32", "device": "cpu"}  # fmt: skip


def changed(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Every place in a nested value, by what it is, and the value with this place changed. Of the entries of a list the
    first is changed, as the others are like it."""
    inner = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, below in inner:
        for new in (*VALUES, GONE):
            other = copy.copy(value)
            if new is GONE:
                del other[key]
            else:
                other[key] = new
            yield f"{where}{key} {'gone' if new is GONE else f'= {new!r:.20}'}", other
        for name, new in changed(below, f"{where}{key}."):
            other = copy.copy(value)
            other[key] = new
            yield name, other


def cases_of(name: str, path: str, value: Any, words: tuple[str, ...], write: Callable[[Any], bytes]) -> Iterator[Case]:
    yield Case(f"{name} unchanged", words, (), with_content(path, write(value)), (0,))
    for where, other in changed(value):
        yield Case(f"{name}: {where}", words, (), with_content(path, write(other)), EITHER)


def as_json(value: Any) -> bytes:
    return (json.dumps(value) + "\n").encode()  # NaN and Infinity as Python writes them


def data_cases() -> Iterator[Case]:
    for name, record in RECORDS.items():
        yield from cases_of(f"show {name}", "d.jsonl", record, ("show", "--data", "d.jsonl"), as_json)
    for name, record in PROMPTS.items():
        words = ("generate", "--prompt-file", "p.jsonl", "--draft", "ngram", "--max-new-tokens", "1")
        yield from cases_of(f"prompts {name}", "p.jsonl", record, words, as_json)


def settings_cases() -> Iterator[Case]:
    words = ("generate", *ONE_TOKEN)
    yield from cases_of("settings", "s.yaml", SETTINGS, (*words, "--settings", "s.yaml"), as_json)
    yield from cases_of("tree", "t.yaml", registry.settings("tree", "static"), (*words, "--tree", "t.yaml"), as_json)
    yield from cases_of(
        "map", "m.json", {"map": [5, 6, 7, 8, 9]}, (*words, "--token-map", "m.json"), lambda v: as_json(v.get("map"))
    )


def checkpoint_cases() -> Iterator[Case]:
    words = ("generate", "--target", "target", "--draft", "draft", *ONE_TOKEN)
    for folder, source in (("target", DEMO_TARGET), ("draft", DEMO_DRAFTER)):
        header = _weights(source / "model.safetensors")[0]
        some = {name: header[name] for name in list(header)[:3]}
        path = f"{folder}/model.safetensors"
        for where, other in changed(some):
            content = as_json({**{k: v for k, v in header.items() if k not in some}, **other})
            yield Case(f"{folder} header: {where}", words, (), _with_header(path, content), EITHER)
    for file in ("tokenizer_config.json", "generation_config.json"):
        if (DEMO_TARGET / file).exists():
            value = json.loads((DEMO_TARGET / file).read_text())
            yield from cases_of(file, f"target/{file}", value, words, as_json)
    value = json.loads((DEMO_DRAFTER / "acceptance.json").read_text())
    yield from cases_of("acceptance.json", "draft/acceptance.json", value, words, as_json)


def _with_header(path: str, header: bytes) -> Callable[[Path], None]:
    """The file of weights with another header. Made when it is wanted: all of them would take gigabytes."""

    def prepare(scratch: Path) -> None:
        rest = _weights(scratch / path)[1]
        (scratch / path).write_bytes(struct.pack("<Q", len(header)) + header + rest)

    return prepare


def _weights(file: Path) -> tuple[dict, bytes]:
    """The header of a safetensors file, and the bytes behind it."""
    content = file.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + size]), content[8 + size :]


@cache
def a_trace() -> dict[str, bytes]:
    """The files of a trace of a few tokens."""
    target, recorder = load_target(DEMO_TARGET), Recorder()
    drafter = load_drafter(DEMO_DRAFTER, target)
    generate(target, "What is a tree?", drafter, tree="2/2/4", max_new_tokens=8, observer=recorder)
    with tempfile.TemporaryDirectory() as folder:
        write_trace(recorder.trace, Path(folder, "t"))
        return {file.name: file.read_bytes() for file in Path(folder, "t").iterdir()}


def trace_cases() -> Iterator[Case]:
    """Of the header only: the other files have their digests in it."""

    def with_header(content: bytes) -> Callable[[Path], None]:
        def prepare(scratch: Path) -> None:
            (scratch / "t").mkdir()
            for name, right in (a_trace() | {HEADER: content}).items():
                (scratch / "t" / name).write_bytes(right)

        return prepare

    header = json.loads(a_trace()[HEADER])
    yield Case("trace unchanged", ("metrics", "t"), (), with_header(as_json(header)), (0,))
    for where, other in changed(header):
        yield Case(f"trace: {where}", ("metrics", "t"), (), with_header(as_json(other)), EITHER)


def file_cases() -> Iterator[Case]:
    yield from data_cases()
    yield from settings_cases()
    yield from checkpoint_cases()
    yield from trace_cases()
