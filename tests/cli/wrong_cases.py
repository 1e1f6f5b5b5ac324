"""Wrong inputs, generated from the schemas of configs, flags and settings and from valid files, and how each is judged.

A case runs in this process, on copies of the demo's checkpoints in a scratch folder.
"""

import argparse
import contextlib
import copy
import gc
import itertools
import json
import math
import pkgutil
import re
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from helpers import edit_config, run_here

from specdec import registry
from specdec.__main__ import main
from specdec.api import DEMO_DRAFTER, DEMO_TARGET
from specdec.cli.commands import COMMANDS, parser_of
from specdec.cli.limits import LIMITS
from specdec.cli.parser import FREE_TEXT
from specdec.model.config_fields import DIAGNOSED, ConfigFields
from specdec.schema import check_value, parameters

VALUES = ("64", None, 0, -1, 1.5, float("nan"), float("inf"), 10**9, 10**30, True, [], [1], {}, {"a": 1}, "", "x" * 99)
FLAG_TEXTS = ("", " ", "nan", "inf", "-1", "0", "1000000000000", "abc", "1.5", "1e400", "2x", "--")
GENERATE = ("generate", "--prompt", "x", "--max-new-tokens", "1")
HYDRA = ("train", "train cache", "sweep", "compare", "lab bench")
TREES = (
    "9999999/1/5", "1/9999999/10000000", "1000/250/4000", "drawn 99,99,99,99", "drawn " + "1," * 999 + "1",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A command line with one mistake."""

    name: str
    words: tuple[str, ...]
    named: tuple[str, ...] = ()  # words that the message must hold
    prepare: Callable[[Path], None] | None = None  # changes files in the scratch folder
    codes: tuple[int, ...] = (2,)  # the exit codes that pass


# Files of checkpoints


def config_values() -> Iterator[tuple[str, object]]:
    """Yield each field of a config with each value that its type and range exclude."""
    for field, value in itertools.product(fields(ConfigFields), VALUES):
        try:
            check_value(field, value, field.name)
        except ValueError:
            yield field.name, value


def with_field(folder: str, name: str, value: object) -> Callable[[Path], None]:
    return lambda scratch: edit_config(scratch / folder, **{name: value})


def with_content(path: str, content: bytes | None) -> Callable[[Path], None]:
    """Write a file with this content; None makes it a dangling link, b"/" a folder."""

    def prepare(scratch: Path) -> None:
        file = scratch / path
        file.unlink(missing_ok=True)
        if content is None:
            file.symlink_to(scratch / "nowhere")
        elif content == b"/":
            file.mkdir()
        else:
            file.write_bytes(content)

    return prepare


def with_index(folder: str, content: bytes | None) -> Callable[[Path], None]:
    def prepare(scratch: Path) -> None:
        (scratch / folder / "model.safetensors").rename(scratch / folder / "part.safetensors")  # which is read first
        with_content(f"{folder}/model.safetensors.index.json", content)(scratch)

    return prepare


CONTENTS = {
    "empty": b"", "a folder": b"/", "a dangling link": None, "deep": b"[" * 100_000, "no text": b"\xff\xfe\x00",
    "a list": b"[1]", "a number of 5000 digits": b'{"a": ' + b"9" * 5000 + b"}", "cut": b'{"a": {',
}  # fmt: skip
WEIGHT_MAPS = (None, [], {}, {"x": 1}, {"x": None}, {"x": "../model.safetensors"}, {"x": "nowhere"}, {"x": ""}, "x", 3)


def checkpoint_cases() -> Iterator[Case]:
    pair = (*GENERATE, "--target", "target", "--draft")
    again = ("data", "regenerate", "--target", "target", "--prompts", "prompts.txt", "--out", "a.jsonl", *GENERATE[-2:])
    users = {
        ("target", DEMO_TARGET): ((*pair, "ngram"), again),
        ("draft", DEMO_DRAFTER): ((*pair, "draft"), ("checkpoint", "inspect", "draft")),
    }
    for (folder, demo), lines in users.items():
        own = json.loads((demo / "config.json").read_text())
        for line, (name, value) in itertools.product(lines, config_values()):
            if name in own and not (line[0] == "checkpoint" and name in DIAGNOSED):  # which it reports, and ends with 0
                yield Case(f"{line[0]} {folder} {name}={value!r:.20}", line, (name,), with_field(folder, name, value))
        for line, file, what in itertools.product(lines, ("config.json", "model.safetensors"), CONTENTS):
            prepare = with_content(f"{folder}/{file}", CONTENTS[what])
            yield Case(f"{line[0]} {folder} {file} {what}", line, (folder,), prepare)
        for content in (*CONTENTS.values(), *(json.dumps({"weight_map": m}).encode() for m in WEIGHT_MAPS)):
            yield Case(f"{folder} index {content!r:.40}", lines[0], (folder,), with_index(folder, content))


# Flags and settings


def flag_cases() -> Iterator[Case]:
    """Yield each flag that takes a value with each text that is empty, no number, or out of its range."""
    for command in [name for name, entry in COMMANDS.items() if not entry.conf]:
        actions = [a for a in parser_of(command)._actions if a.option_strings and a.nargs != 0]
        given = {a.option_strings[-1]: "1" if a.type is int else next(iter(a.choices or ["none"])) for a in actions}
        required = [w for a in actions if a.required for w in (a.option_strings[-1], given[a.option_strings[-1]])]
        for action, text in itertools.product(actions, FLAG_TEXTS):
            empty = not text.strip() and action.dest not in FREE_TEXT
            if empty or (action.type in (int, float) and _refused(action, text)):
                flag = action.option_strings[-1]
                others = [w for w in required if w != flag]
                yield Case(f"{command} {flag}={text!r}", (*command.split(), *others, f"{flag}={text}"), (flag,))


def _refused(action: argparse.Action, text: str) -> bool:
    """Whether a flag for a number refuses this text."""
    try:
        number = action.type(text)
        if action.dest in LIMITS:
            check_value(LIMITS[action.dest], number, action.dest)
        return not math.isfinite(number)
    except ValueError:
        return True


def hydra_cases() -> Iterator[Case]:
    """Yield each setting of conf/ with values of other types than its default, and with a wrong name."""
    for command in HYDRA:
        own = registry.read_yaml(registry.CONF / f"{COMMANDS[command].conf}.yaml", "settings")
        entries = {k: v for k, v in own.items() if k not in ("defaults", "hydra")}
        for group, name in ((g, n) for e in own["defaults"] if isinstance(e, dict) for g, n in e.items()):
            if " " not in group and name is not None:
                content = registry.settings(group, name)
                if "_target_" not in content:
                    entries |= {f"{group}.{k}": v for k, v in content.items() if k != "defaults"}
        for name, default in entries.items():
            if not isinstance(default, dict) and not (registry.CONF / name).is_dir():
                yield from setting_cases(tuple(command.split()), name, default)


def setting_cases(words: tuple[str, ...], name: str, default: object) -> Iterator[Case]:
    """Yield a setting with values of other types than its default, and with one letter too many in its name."""
    line = " ".join(words)
    yield Case(f"{line} +{name}x", (*words, f"+{name}x=1"), (f"{name}x",))
    number = isinstance(default, int | float) and not isinstance(default, bool)
    texts = ("", "nan", *["abc"] * number, *["-1"] * (number and isinstance(default, int)))
    for text in texts:
        yield Case(f"{line} {name}={text}", (*words, f"{name}={text}"), (name.split(".")[-1],))


def class_cases() -> Iterator[Case]:
    """Yield settings of the classes that conf/ names."""
    for command, group in (("train", "drafter"), ("train", "objective"), ("sweep", "verifier"), ("sweep", "sampling")):
        for name in registry.names(group):
            content = registry.settings(group, name)
            if "_target_" not in content:
                continue
            taken, others = parameters(pkgutil.resolve_name(content["_target_"]))
            for key, default in content.items():
                cases = setting_cases((command, f"{group}={name}"), f"{group}.{key}", default) if key in taken else ()
                # A function that takes any name refuses a wrong one only when it is called.
                yield from (case for case in cases if not others or not case.words[-1].startswith("+"))


def yaml_cases() -> Iterator[Case]:
    bomb = "a0: &a0 [x,x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 64))
    texts = {"bomb": bomb, "circle": "a: &a [*a]", "deep": "[" * 20_000, "no mapping": "[1]", "no YAML": "a: [",
             "empty": ""}  # fmt: skip
    for (what, text), flag in itertools.product(texts.items(), ("--settings", "--tree")):
        if (what, flag) != ("empty", "--settings"):
            prepare = with_content("s.yaml", text.encode())
            yield Case(f"YAML {what} {flag}", (*GENERATE, flag, "s.yaml"), ("s.yaml",), prepare)


# Files with one place changed. Some changes are valid, so exit code 0 passes as well

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


def edited_checkpoint_cases() -> Iterator[Case]:
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


def cases() -> list[Case]:
    found = [
        *checkpoint_cases(), *flag_cases(), *hydra_cases(), *class_cases(), *yaml_cases(), *data_and_settings_cases(),
        *edited_checkpoint_cases(),
        *(Case(f"tree {tree:.30}", (*GENERATE, "--tree", tree), ("at most",)) for tree in TREES),
    ]  # fmt: skip
    return list({case.name: case for case in found}.values())


# How a case is run and judged

SECONDS, MEBIBYTES = 20, 1000  # a case may take: processor time, and memory in addition to that of the process


def run(case: Case, scratch: Path) -> str:
    """Run a case in `scratch`, which is made anew. Returns what is wrong with its outcome, empty if nothing is."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    for name, source in (("target", DEMO_TARGET), ("draft", DEMO_DRAFTER)):
        if case.prepare is not None or name in case.words:
            # Cases change the other files in place; they replace the weights.
            shutil.copytree(source, scratch / name, ignore=shutil.ignore_patterns("*.safetensors"))
            (scratch / name / "model.safetensors").symlink_to(source / "model.safetensors")
    (scratch / "prompts.txt").write_text("What is a tree?\n")
    if case.prepare is not None:
        case.prepare(scratch)
    gc.collect()  # models that the traceback of the previous case holds
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, there, start = memory("VmRSS"), set(scratch.rglob("*")), time.process_time()
    code, err = call(case.words, scratch)
    seconds, mebibytes = time.process_time() - start, memory("VmHWM") - before
    if fault := judge(case, code, err):
        return fault
    if seconds > SECONDS or mebibytes > MEBIBYTES:
        return f"took {seconds:.0f} s and {mebibytes:.0f} MiB"
    return "".join(f"left {path}" for path in sorted(set(scratch.rglob("*")) - there)[:1])


def memory(what: str) -> float:
    """Return resident MiB of this process: now (VmRSS), or the peak (VmHWM)."""
    return int(re.search(rf"{what}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024


def call(words: tuple[str, ...], folder: Path) -> tuple[object, str]:
    """Run a command in this process. Returns its exit code, or the exception that it raised, and standard error."""
    with contextlib.chdir(folder):
        try:
            done = run_here(main, *words)
        except BaseException as error:
            return f"{type(error).__name__}: {error}", ""
    return done.returncode, done.stderr


def judge(case: Case, code: object, err: str) -> str:
    if code not in case.codes:
        return f"ended with {code!r:.200}"
    if code == 0:
        return ""
    messages = [line for line in err.splitlines() if "error: " in line]
    if len(messages) != 1 or "Traceback" in err:
        return f"not one sentence: {err[-200:]!r}"
    if not all(name.lstrip("-").replace("-", "_") in messages[0].replace("-", "_") for name in case.named):
        return f"does not name {case.named}: {messages[0]}"
    return ""
