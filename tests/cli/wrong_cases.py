"""Wrong inputs, generated from the schemas of configs, flags and settings."""

import argparse
import itertools
import json
import math
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from specdec import registry
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
    def prepare(scratch: Path) -> None:
        file = scratch / folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))

    return prepare


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


def tree_cases() -> Iterator[Case]:
    many = "drawn " + "1," * 999 + "1"
    for tree in ("9999999/1/5", "1/9999999/10000000", "1000/250/4000", "drawn 99,99,99,99", many):
        yield Case(f"tree {tree:.30}", (*GENERATE, "--tree", tree), ("at most",))


def yaml_cases() -> Iterator[Case]:
    bomb = "a0: &a0 [x,x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 64))
    texts = {"bomb": bomb, "circle": "a: &a [*a]", "deep": "[" * 20_000, "no mapping": "[1]", "no YAML": "a: [",
             "empty": ""}  # fmt: skip
    for (what, text), flag in itertools.product(texts.items(), ("--settings", "--tree")):
        if (what, flag) != ("empty", "--settings"):
            prepare = with_content("s.yaml", text.encode())
            yield Case(f"YAML {what} {flag}", (*GENERATE, flag, "s.yaml"), ("s.yaml",), prepare)


def schema_cases() -> list[Case]:
    found = [*checkpoint_cases(), *flag_cases(), *hydra_cases(), *class_cases(), *tree_cases(), *yaml_cases()]
    return list({case.name: case for case in found}.values())
