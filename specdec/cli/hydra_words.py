"""The words of a command with settings of Hydra: the names that all commands share, values quoted, lists as 1,4.

A word may also name a part of the user's own, such as drafter=my.py:create (`specdec.own`).
"""

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from specdec import own, registry
from specdec.cli.flags import FLAGS, MEANT, dashed
from specdec.cli.parser import nearest_flags

HYDRA_FLAGS = (  # of which argparse takes the beginning too
    *("--help", "--hydra-help", "--version", "--cfg", "--resolve", "--package", "--run", "--multirun", "--info"),
    *("--shell-completion", "--config-path", "--config-name", "--config-dir", "--experimental-rerun"),
)
WITH_VALUE = ("--cfg", "--package", "--config", "--shell", "--experimental")  # how flags begin that take one
PLAIN = re.compile(r"[\w./:@%+*?|$\\-]*", re.ASCII)  # what Hydra reads as it is
WRITTEN = re.compile(r"""['"\[{].*|\w+\(.*\)|.*\$\{.*""", re.DOTALL)  # in Hydra's own grammar, which stays
GIVEN = ("target", "vocab")  # arguments that the trainer gives to a drafter


def hydra_words(conf: str, words: Mapping[str, str], old: Mapping[str, str], given: Sequence[str]) -> list[str]:
    """Return a command line as Hydra reads it. Raises ValueError for a flag that does not exist or has no value.

    Args:
        conf: The command's settings, conf/CONF.yaml.
        words: Name of a flag that all commands share -> the setting that it stands for.
        old: Old name of a setting -> its name.
        given: NAME=VALUE, --NAME=VALUE, --NAME VALUE or --SWITCH, and Hydra's own flags.
    """
    settings, _ = registry.of_command(conf)
    several = any(word == "-m" or (len(word) > 2 and "--multirun".startswith(word)) for word in given)
    rest, found = list(given), list[str]()
    flags = list[str]()  # Hydra's own flags go first: argparse takes none between settings
    while rest:
        word = rest.pop(0)
        hydras = any(known.startswith(word.partition("=")[0]) for known in HYDRA_FLAGS)
        if word.startswith("-") and (hydras or not word.startswith("--")):
            takes = word.startswith(("-c", "-p", *WITH_VALUE)) and "=" not in word
            (found if word == "--" else flags).extend([word, *(rest[:1] if takes else [])])
            del rest[: 1 if takes else 0]
            continue
        name, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--"):
            name = name.replace("-", "_")
            if name.partition(".")[0] not in {*words, *settings, *registry.GROUPS, "hydra"}:
                flag = word.partition("=")[0]
                near = " and ".join(nearest_flags(flag, map(dashed, (*words, *settings))))
                raise ValueError(f"there is no flag {flag}; {f'there is {near}' if near else '--help lists all'}")
            if not equals:
                value = _value(name, settings, rest)
        elif "." not in name and name not in {*settings, *words} and MEANT.get(name) in {*settings, *words}:
            raise ValueError(f"there is no setting {name}; there is {MEANT[name]}")
        if name in old:
            print(f"note: the setting {name} is now {old[name]}", file=sys.stderr)
            name = old[name]
        found.append(_setting(name, value, words, several) if equals or word.startswith("--") else word)
    return flags + found


def _value(name: str, settings: Mapping, rest: list[str]) -> str:
    """Take the value of a flag from the words after it; a switch has none."""
    switch = FLAGS[name].kind is bool if name in FLAGS else isinstance(settings.get(name), bool)
    if switch and (not rest or rest[0] not in ("true", "false")):
        return "true"
    if not rest:
        raise ValueError(f"{dashed(name)} takes a value")
    return rest.pop(0)


def _setting(name: str, value: str, words: Mapping[str, str], several: bool) -> str:
    """Return NAME=VALUE as Hydra reads it. several: commas part the values of several runs, as --multirun has it."""
    path = words.get(name, name)
    group = path.partition(".")[0]
    if name in words and path.endswith(".path") and value in registry.names(group):
        return f"{group}={value}"
    if name in words and value.startswith("{"):
        path = name
    if value.startswith("[") and path in registry.GROUPS:
        raise ValueError(f"{path} must be the name of a file in conf/{path}, got {value}")
    if WRITTEN.fullmatch(value) or (several and "," in value) or (value == "" and name not in words):
        return f"{path}={value}"
    is_file = path.endswith(".path") or (name in FLAGS and FLAGS[name].kind is Path)
    if "," in value and (" " not in value or path == "draft") and not is_file:  # a tree may be "drawn 3,1,1"
        return f"{path}=[{','.join(_quoted(part.strip()) for part in value.split(','))}]"
    return f"{path}={_quoted(value)}"


def _quoted(value: str) -> str:
    return value if PLAIN.fullmatch(value) else quoted(value)


def bare(value: str) -> str:
    """Return the value of a word without the quotation marks around it: the reverse of `quoted`."""
    inside = re.sub(r"(\\+)('|$)", lambda found: found[1][: len(found[1]) // 2] + found[2], value[1:-1])
    return inside.replace("\\${", "${") if value[:1] in ("'", '"') else value


def quoted(word: str) -> str:
    """Return a word as Hydra reads it, whatever it holds. A backslash is one there, except before a quotation mark."""
    escaped = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + (found[2] and "\\'"), word)
    return "'" + escaped.replace("${", "\\${") + "'"


def own_parts(words: Sequence[str]) -> list[str]:
    """Register each own part with Hydra; return the words with the names that Hydra knows them by from now on."""
    found = []
    for word in words:
        group, _, text = word.partition("=")
        text = bare(text)
        known = group not in own.POINTS or text in registry.names(group)
        part = None if known or not (own.is_own(text) or re.fullmatch(r"[\w-]+", text)) else own.find(group, text)
        found.append(word if part is None else f"{group}={_store(group, text, part)}")
    return found


def _store(group: str, text: str, part) -> str:
    """Tell Hydra of a part, and return the name that it has there."""
    from hydra.core.config_store import ConfigStore

    code, checkpoint = own.split(text)
    if checkpoint is not None:
        raise ValueError(f"{group}={text} names a checkpoint: give from={text} to train it further")
    settings = own.settings_of(code, part, *(GIVEN if group == "drafter" else ()))
    if group == "drafter":
        own.check_arguments(code, part, None, vocab=None)
        settings = {"draft_vocab_size": None} | settings
    name = re.sub(r"\W+", "_", own.short(code).replace(".py:", "_")) + ("_" if own.is_own(code) else "")
    ConfigStore.instance().store(group=group, name=name, node={"_target_": code} | settings)
    return name
