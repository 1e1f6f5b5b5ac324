"""The cases of `scripts/wrong_inputs.py`: wrong inputs that are generated from the schemas of all inputs."""

import argparse
import itertools
import json
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path

import checkout  # noqa: F401

from specdec import registry
from specdec.__main__ import COMMANDS
from specdec.api import DEMO_DRAFTER, DEMO_TARGET
from specdec.cli.flags import FREE_TEXT
from specdec.cli.limits import LIMITS
from specdec.model.config_fields import DIAGNOSED, ConfigFields
from specdec.schema import check_value, parameters

VALUES = ("64", None, 0, -1, 1.5, float("nan"), float("inf"), 10**9, 10**30, True, [], [1], {}, {"a": 1}, "", "x" * 99)
FLAG_TEXTS = ("", " ", "nan", "inf", "-1", "0", "1000000000000", "abc", "1.5", "1e400", "2x", "--")
HYDRA_TEXTS = ("", "nan", "-1", "abc", "1000000000000000000000", "[]", "{a: 1}")
HYDRA = {"train": "train", "cache": "cache", "sweep": "sweep", "compare": "compare", "bench": "bench",
         "estimate": "train"}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A command line with one wrong thing. named: the name of it, which the message must hold. codes: the exit codes
    that it may end with."""

    name: str
    words: tuple[str, ...]
    named: tuple[str, ...] = ()
    prepare: Callable[[Path], None] | None = None  # damages the copies in the scratch folder
    codes: tuple[int, ...] = (2,)


# Files of checkpoints


def config_values() -> Iterator[tuple[str, object]]:
    """Each field of a config with each value that its type and range exclude."""
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
    """A file with this content; None makes it a dangling link, b"/" a folder."""

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


CONTENTS = {
    "empty": b"", "a folder": b"/", "a dangling link": None, "deep": b"[" * 100_000, "no text": b"\xff\xfe\x00",
    "a list": b"[1]", "a number of 5000 digits": b'{"a": ' + b"9" * 5000 + b"}", "cut": b'{"a": {',
}  # fmt: skip
WEIGHT_MAPS = (None, [], {}, {"x": 1}, {"x": None}, {"x": "../model.safetensors"}, {"x": "nowhere"}, {"x": ""}, "x", 3)


def checkpoint_cases() -> Iterator[Case]:
    users = {
        "target": (
            ("generate", "--target", "{}", "--draft", "ngram", "--prompt", "x", "--max-new-tokens", "1"),
            ("regenerate", "--target", "{}", "--prompts", "prompts.txt", "--out", "new.jsonl", "--max-new-tokens", "1"),
        ),
        "draft": (
            ("generate", "--target", "target", "--draft", "{}", "--prompt", "x", "--max-new-tokens", "1"),
            ("doctor", "inspect", "{}"),
        ),
    }
    own = {
        f: json.loads((p / "config.json").read_text()) for f, p in (("target", DEMO_TARGET), ("draft", DEMO_DRAFTER))
    }
    for folder, commands in users.items():
        lines = [tuple(word.format(folder) for word in line) for line in commands]
        for name, value in config_values():
            if name in own[folder]:
                for line in lines:
                    if line[0] == "doctor" and name in DIAGNOSED:  # it says what is wrong with them, and ends with 0
                        continue
                    yield Case(
                        f"{line[0]} {folder} {name}={value!r:.20}", line, (name,), with_field(folder, name, value)
                    )
        for file, (what, content) in itertools.product(("config.json", "model.safetensors"), CONTENTS.items()):
            for line in lines:
                yield Case(
                    f"{line[0]} {folder} {file} {what}", line, (folder,), with_content(f"{folder}/{file}", content)
                )
        index = f"{folder}/model.safetensors.index.json"
        for content in (*CONTENTS.values(), *(json.dumps({"weight_map": m}).encode() for m in WEIGHT_MAPS)):
            yield Case(f"{folder} index {content!r:.40}", lines[0], (folder,), with_content(index, content))


# Flags and settings


def parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for name, (module, _) in COMMANDS.items():
        found = getattr(import_module(module), "parser", None)
        if found is not None and name != "doctor":
            yield name, found()


def flag_cases() -> Iterator[Case]:
    """Each flag that takes a value with each text that is empty, no number, or out of its range."""
    for command, parser in parsers():
        actions = [a for a in parser._actions if a.option_strings and a.nargs != 0]
        required = [
            w for a in actions if a.required for w in (a.option_strings[-1], "1" if a.type is int else "nowhere.json")
        ]
        for action, text in itertools.product(actions, FLAG_TEXTS):
            number = action.type in (int, float)
            bad = not text.strip() and action.dest not in FREE_TEXT
            bad |= number and (_no_number(action.type, text) or _out_of_range(action.dest, text))
            if bad:
                flag = action.option_strings[-1]
                others = [w for w in required if w != flag]
                yield Case(f"{command} {flag}={text!r}", (command, *others, f"{flag}={text}"), (flag,))


def _no_number(kind: type, text: str) -> bool:
    try:
        return kind(text) in (float("inf"), float("-inf")) or kind(text) != kind(text)
    except ValueError:
        return True


def _out_of_range(name: str, text: str) -> bool:
    try:
        return name in LIMITS and check_value(LIMITS[name], float(text) if "." in text else int(text), name) is not None
    except ValueError:
        return True


def hydra_cases() -> Iterator[Case]:
    """Each setting of conf/ with values of other types than its default, and names that there are not."""
    for command, config in HYDRA.items():
        own = registry.read_yaml(registry.CONF / f"{config}.yaml", "settings")
        entries = {k: v for k, v in own.items() if k not in ("defaults", "hydra")}
        for group, name in ((g, n) for e in own["defaults"] if isinstance(e, dict) for g, n in e.items()):
            if " " not in group and name is not None:
                content = registry.settings(group, name)
                if "_target_" not in content:
                    entries |= {f"{group}.{k}": v for k, v in content.items() if k != "defaults"}
        for name, default in entries.items():
            if not isinstance(default, dict) and not (registry.CONF / name).is_dir():
                yield from setting_cases((command,), name, default)


def setting_cases(words: tuple[str, ...], name: str, default: object) -> Iterator[Case]:
    """A setting with values of other types than its default, and one letter too many in its name."""
    line = " ".join(words)
    yield Case(f"{line} +{name}x", (*words, f"+{name}x=1"), (f"{name}x",))
    number = isinstance(default, int | float) and not isinstance(default, bool)
    for text in HYDRA_TEXTS:
        whole = number and isinstance(default, int)
        if text in ("", "nan") or (number and text in ("abc", "{a: 1}")) or (whole and text == "-1"):
            yield Case(f"{line} {name}={text}", (*words, f"{name}={text}"), (name.split(".")[-1],))


def class_cases() -> Iterator[Case]:
    """What the classes take that conf/ names: every name of every group, for a command that has the group."""
    for command, group in (("train", "drafter"), ("train", "objective"), ("sweep", "verifier"), ("sweep", "sampling")):
        for name in registry.names(group):
            content = registry.settings(group, name)
            if "_target_" not in content:
                continue
            taken, others = parameters(pkgutil.resolve_name(content["_target_"]))
            for key, default in content.items():
                cases = setting_cases((command, f"{group}={name}"), f"{group}.{key}", default) if key in taken else ()
                # A function that takes any name refuses a wrong one when it is called, and not before.
                yield from (case for case in cases if not others or not case.words[-1].startswith("+"))


def tree_cases() -> Iterator[Case]:
    for tree in (
        "9999999/1/5",
        "1/9999999/10000000",
        "1000/250/4000",
        "drawn 99,99,99,99",
        "drawn " + "1," * 999 + "1",
    ):
        words = ("generate", "--prompt", "x", "--tree", tree, "--max-new-tokens", "1")
        yield Case(f"tree {tree:.30}", words, ("at most",))


def yaml_cases() -> Iterator[Case]:
    bomb = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)
    )
    texts = {
        "bomb": bomb,
        "circle": "a: &a [*a]",
        "deep": "[" * 20_000,
        "no mapping": "[1]",
        "no YAML": "a: [",
        "empty": "",
    }
    for (what, text), flag in itertools.product(texts.items(), ("--settings", "--tree")):
        if (what, flag) != ("empty", "--settings"):
            words = ("generate", "--prompt", "x", flag, "s.yaml")
            yield Case(f"YAML {what} {flag}", words, ("s.yaml",), with_content("s.yaml", text.encode()))


def all_cases() -> list[Case]:
    found = [*checkpoint_cases(), *flag_cases(), *hydra_cases(), *class_cases(), *tree_cases(), *yaml_cases()]
    return list({case.name: case for case in found}.values())
