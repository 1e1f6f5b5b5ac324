"""Files that commands read, each with one place changed. Some changes are valid, so exit code 0 passes as well."""

import copy
import itertools
import json
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from wrong_cases import GENERATE, Case, with_content

from specdec import registry
from specdec.api import DEMO_DRAFTER, DEMO_TARGET

GONE = object()  # removes the entry
SOME_VALUES = ("64", None, -1, 1.5, float("nan"), 10**30, True, [1], {}, "", GONE)
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
    """Yield a description and a changed copy for every place in a nested value, but of a list only for its first."""
    inner = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, below in inner:
        for new in SOME_VALUES:
            other = copy.copy(value)
            other[key] = new
            if new is GONE:
                del other[key]
            yield f"{where}{key} {'gone' if new is GONE else f'= {new!r:.20}'}", other
        for name, new in changed(below, f"{where}{key}."):
            yield name, value | {key: new} if isinstance(value, dict) else [new, *value[1:]]


def cases_of(name: str, value: Any, words: tuple[str, ...], put: Callable[[Any], Callable]) -> Iterator[Case]:
    """Yield a case for each change of `value`; `put` makes what writes it into the scratch folder."""
    yield Case(f"{name} unchanged", words, (), put(value), (0,))
    for where, other in changed(value):
        yield Case(f"{name}: {where}", words, (), put(other), (0, 2))


def as_json(value: Any) -> bytes:
    return (json.dumps(value) + "\n").encode()  # NaN and Infinity as Python writes them


def at(path: str) -> Callable[[Any], Callable]:
    return lambda value: with_content(path, as_json(value))


def data_and_settings_cases() -> Iterator[Case]:
    for name, record in RECORDS.items():
        yield from cases_of(f"show {name}", record, ("data", "show", "--data", "d.jsonl"), at("d.jsonl"))
    for name, record in PROMPTS.items():
        words = ("generate", "--max-new-tokens", "1", "--draft", "ngram", "--prompts", "p.jsonl")
        yield from cases_of(f"prompts {name}", record, words, at("p.jsonl"))
    tree, tokens = registry.settings("tree", "static"), {"map": [5, 6, 7, 8, 9]}
    yield from cases_of("settings", SETTINGS, (*GENERATE, "--settings", "s.yaml"), at("s.yaml"))
    yield from cases_of("tree", tree, (*GENERATE, "--tree", "t.yaml"), at("t.yaml"))
    words = (*GENERATE, "--token-map", "m.json")
    yield from cases_of("map", tokens, words, lambda value: at("m.json")(value.get("map")))


def checkpoint_cases() -> Iterator[Case]:
    words = (*GENERATE, "--target", "target", "--draft", "draft")
    demo = {"target": DEMO_TARGET, "draft": DEMO_DRAFTER}
    for folder, source in demo.items():
        header, _ = weights(source / "model.safetensors")
        some = {name: header.pop(name) for name in list(header)[:3]}
        put = partial(with_header, f"{folder}/model.safetensors", header)
        yield from cases_of(f"{folder} header", some, words, put)
    for path in ("target/tokenizer_config.json", "target/generation_config.json", "draft/acceptance.json"):
        folder, name = path.split("/")
        yield from cases_of(name, json.loads((demo[folder] / name).read_text()), words, at(path))


def with_header(path: str, rest: dict, header: dict) -> Callable[[Path], None]:
    """Replace the header of a safetensors file. The file is made on demand: all of them would take gigabytes."""

    def prepare(scratch: Path) -> None:
        content, file = as_json(rest | header), scratch / path
        _, tensors = weights(file)
        file.unlink()
        file.write_bytes(struct.pack("<Q", len(content)) + content + tensors)

    return prepare


def weights(file: Path) -> tuple[dict, bytes]:
    """Return the header of a safetensors file, and the bytes after it."""
    content = file.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def file_cases() -> Iterator[Case]:
    return itertools.chain(data_and_settings_cases(), checkpoint_cases())
