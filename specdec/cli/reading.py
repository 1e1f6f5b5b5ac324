"""How files that users give are read: each that is no such file is one sentence, whatever is wrong with it."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, AnyStr, TypeVar, cast

from specdec.schema import shown

MOST_BYTES = 1 << 28  # of a settings file, an index or a config; published ones have a tenth of it at most
MOST_LINE = 1 << 22  # bytes of a prompt or a conversation: to tokenize them takes a hundred times as much memory
MOST_YAML = 1 << 20  # characters of a YAML file: its parser takes seconds for as many
MOST_DEPTH = 200  # of brackets in a YAML file
MOST_NODES = 100_000  # values of a YAML file, with those that its aliases repeat
LAST_LINE = re.compile(r".*\S\n(?=\S)", re.DOTALL)  # the text before the last line between two words
LAST_WORD = re.compile(r".*\S(?=\s+\S)", re.DOTALL)  # the text before the space of the last word
Model = TypeVar("Model")


def read_text(path: Path, what: str, most: int | None = MOST_BYTES) -> str:
    """The text of a file, see `open_text`."""
    with open_text(path, what, most) as file:
        return file.read()


@contextmanager
def open_text(path: Path, what: str, most: int | None = None) -> Iterator[IO[str]]:
    """Open a file in UTF-8, with or without a byte order mark, for reading.

    what: names the kind of file in errors. most: bytes; None for any number.
    Raises ValueError, one sentence, if it is not there, cannot be read or is too large.
    """
    if path.is_symlink() and not path.exists():
        raise ValueError(f"{path} is a link to {path.readlink()}, which is not there")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; a {what} file is expected there")
    try:
        if not path.exists():
            raise ValueError(f"no such {what} file: {path}")
        if most is not None and path.stat().st_size > most:
            raise ValueError(f"{path} has {path.stat().st_size} bytes, and a {what} file at most {most}")
        with path.open(encoding="utf-8-sig") as file:
            yield file
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from None
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None


def parse_json(text: str | bytes, where: str) -> Any:
    """The value of a JSON text. Raises ValueError, one sentence that begins with `where`, for anything else."""
    if not text.strip():
        raise ValueError(f"{where} is not valid JSON: it is empty")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(f"{where} is not valid JSON: it is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8 text: {error}") from None
    except ValueError as error:  # also of a number with thousands of digits
        raise ValueError(f"{where} is not valid JSON: {error}") from None


def lines_of(file: IO[AnyStr], most: int = MOST_LINE) -> Iterator[AnyStr]:
    """Yield lines, one in memory at a time; of one longer than `most` the first `most` + 1, see `check_length`."""
    while line := file.readline(most + 1):
        yield line
        while len(line) > most and line[-1:] not in ("\n", b"\n"):
            line = file.readline(most + 1)


def pieces_of(file: IO[str], size: int = 1 << 16) -> Iterator[str]:
    """Yield a text in pieces of about `size` characters, so that it is never whole in memory.

    A piece ends at a single line break between two words. Byte-level tokenizers end a token there, so the pieces have
    the tokens of the whole text. A piece without such a line break ends before a space, or at any character.
    """
    rest = ""
    while part := file.read(size):
        rest += part
        found = LAST_LINE.match(rest) or (LAST_WORD.match(rest) if len(rest) > size else None)
        cut = found.end() if found else len(rest) if len(rest) > size else 0
        if cut:
            yield rest[:cut]
            rest = rest[cut:]
    if rest:
        yield rest


def check_length(text: bytes | str, where: str = "it", most: int = MOST_LINE) -> None:
    """Raise ValueError, one sentence that begins with `where`, for a line or another text that is too long."""
    if len(text) > most:
        raise ValueError(f"{where} is longer than {most >> 20} MiB, the most that one line or text may have")


def read_model(model: type[Model], value: object, where: str) -> Model:
    """Return what a model of pydantic makes of a value. Raises ValueError with the place, field and value."""
    from pydantic import ValidationError  # here: commands that read no such file start without pydantic

    try:
        json.dumps(value, ensure_ascii=False).encode()
        return cast(Any, model).model_validate(value)
    except UnicodeEncodeError:
        raise ValueError(f"{where}: a text holds half of a surrogate pair, which is no character") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    raise ValueError(f"{where}: {mistake(first)}") from None


def place_in_words(place: Sequence[str | int]) -> str:
    """Return the name of a place in JSON, such as `messages[2].content[0].type`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")


def mistake(error: Mapping[str, Any]) -> str:
    """One mistake that pydantic found, in words: the field, what is expected, and what is there."""
    where = place_in_words(error["loc"])
    if (reason := error.get("ctx", {}).get("error")) is not None:
        return f"{where} {reason}".strip()
    if error["type"] in ("missing", "too_short"):
        return f"{where} is missing" if error["type"] == "missing" else f"{where} is empty; give at least one"
    if error["type"] == "extra_forbidden":
        return f"{where} is no field of it"
    wanted = error["msg"].removeprefix("Input should be ").partition(" or instance of")[0]
    return f"{where or 'it'} must be {wanted}, got {shown(error['input'])}"


def check_yaml(text: str, where: str) -> None:
    """Raise ValueError for YAML that is too large or ambiguous, without building its values.

    Too large: aliases or nesting make more than `MOST_NODES` values. Ambiguous: numbers that YAML reads otherwise than
    people do, such as 010 (8) and 1:30 (90).
    """
    import yaml

    if len(text) > MOST_YAML:
        raise ValueError(f"{where} has {len(text)} characters, and a YAML file has at most {MOST_YAML}")
    if _depth(text) > MOST_DEPTH:  # before the parser, whose time grows with the square of it
        raise ValueError(f"{where} is not a YAML file: it is nested too deeply")
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        count = _count(root, {}) if root is not None else 0
    except _Odd as error:
        raise ValueError(f"{where} {error}") from None
    except RecursionError:
        raise ValueError(f"{where} is not a YAML file: it is nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{where} is not a YAML file: {str(error).splitlines()[0]}") from None
    if count > MOST_NODES:
        raise ValueError(f"{where} holds {count:.3g} values with those that its aliases repeat, at most {MOST_NODES}")


def _depth(text: str) -> int:
    """How deep brackets are nested in a text, whatever is quoted."""
    depth = most = 0
    for mark in re.findall(r"[][{}]", text):
        depth = depth + 1 if mark in "[{" else max(depth - 1, 0)
        most = max(most, depth)
    return most


class _Odd(ValueError):
    """A number of YAML 1.1 that is another one to its writer."""


def _check_number(node) -> None:
    """Raise `_Odd` for a scalar node that YAML reads as an octal number or as one to base 60."""
    octal = re.fullmatch(r"[-+]?0[0-7_]+", node.value) and int(plain := node.value.replace("_", ""), 8) != int(plain)
    if node.tag.endswith((":int", ":float")) and (octal or ":" in node.value):
        base, mark = (8, "a leading 0") if octal else (60, "colons")
        raise _Odd(
            f"line {node.start_mark.line + 1} has {shown(node.value)[1:-1]}, which YAML reads as a number to base "
            f"{base}: write the number without {mark}, or a text in quotes"
        )


def _count(node, known: dict[int, int]) -> int:
    """Count values below a YAML node. known: counted nodes; 0 while they are being counted, which reveals a cycle."""
    if isinstance(node.value, str):
        _check_number(node)
    if known.get(id(node)) == 0:
        raise ValueError("an alias stands for what it is in")
    if id(node) not in known:
        known[id(node)] = 0
        parts = node.value if isinstance(node.value, list) else []
        inner = [part for pair in parts for part in (pair if isinstance(pair, tuple) else (pair,))]
        known[id(node)] = 1 + sum(_count(part, known) for part in inner)
    return known[id(node)]
