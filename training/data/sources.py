"""Where conversations come from: files, and data sets of the Hugging Face hub. Each record knows its place there."""

import json
import lzma
import re
from codecs import BOM_UTF8
from collections.abc import Iterator
from dataclasses import dataclass
from glob import glob
from importlib.resources import files
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from specdec.cli.reading import check_length, lines_of, parse_json
from specdec.training.data.conversation import Conversation, conversation_of

FILES = (".json", ".jsonl", ".jsonl.xz", ".txt")
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass
class Record:
    """One record as it was found."""

    where: str  # the file and the line, for messages
    raw: bytes | dict  # a line of JSON, or a row of a `.json` file or a data set

    def fields(self) -> dict:
        """What the record holds. Raises ValueError, which does not say where, if it is not an object."""
        if isinstance(self.raw, bytes):
            check_length(self.raw)
        try:
            row = json.loads(self.raw) if isinstance(self.raw, bytes) else self.raw
        except UnicodeDecodeError:
            raise ValueError("not UTF-8 text") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"invalid JSON: {error.msg.removesuffix(' at')} at column {error.colno}") from None
        except (RecursionError, ValueError):
            raise ValueError("invalid JSON: nested too deeply, or a number of thousands of digits") from None
        if not isinstance(row, dict):
            raise ValueError(f"a record must be an object, not {type(row).__name__}")
        return row

    def messages(self) -> Conversation:
        """OpenAI messages, at least one. Raises ValueError, which does not say where, if the form is not known."""
        found = conversation_of(self.fields())
        for message in found:
            check_length(message["content"])
        return found


def read_conversations(path: str | Path) -> Iterator[Conversation]:
    """Yields each conversation as OpenAI messages; see `read_records`. Raises ValueError at the first bad record."""
    for record in read_records(path):
        try:
            yield record.messages()
        except ValueError as error:
            raise ValueError(f"{record.where}: {error}") from None


def read_records(
    name: str | Path, *, split: str | None = None, subset: str | None = None, streaming: bool = False
) -> Iterator[Record]:
    """The records of a file, of all files that match a pattern (in order of their names), or of a data set.

    A record is one of four forms:

    - ShareGPT: `conversations: [{from, value}]`, with `system` and `tools` if there are any.
    - OpenAI: `messages: [{role, content}]`, with `tools`.
    - Plain text: `text`. It becomes one message of the role 'text'.
    - Prompts: `turns` or `prompt`. The first turn is taken.

    `conversation` says which fields of a turn count.

    Files are `.json`, `.jsonl`, `.jsonl.xz` and `.txt`, a prompt a line. Everything else is read through `datasets`:
    `.parquet`, a folder, the name of a data set on the hub. `split` ('train' if not given), `subset` and `streaming`
    are for these; streaming reads rows as they are needed instead of downloading the data set first.

    Raises ValueError for what cannot be read or holds no record.
    """
    paths = sorted(glob(str(name))) if any(c in str(name) for c in "*?[") else [str(name)]
    if not paths:
        raise ValueError(f"no such data file: {name}")
    for path in paths:
        records = _file(Path(path)) if path.endswith(FILES) else _dataset(path, split or "train", subset, streaming)
        if (first := next(records, None)) is None:
            raise ValueError(f"{path} is empty: it holds no record")
        yield first
        yield from records


def _file(path: Path) -> Iterator[Record]:
    if not path.is_file():
        raise ValueError(f"no such data file: {path}")
    opener = lzma.open if path.suffix == ".xz" else open
    try:
        with opener(path, "rb") as lines:
            if path.suffix == ".json":
                yield from _json(path, lines.read())
                return
            for number, line in enumerate(lines_of(lines), 1):
                line = line.removeprefix(BOM_UTF8) if number == 1 else line
                if line.strip() and path.suffix == ".txt":
                    yield Record(f"{path} line {number}", {"prompt": _text(line, f"{path} line {number}")})
                elif line.strip():
                    yield Record(f"{path} line {number}", line)
    except (lzma.LZMAError, EOFError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None


def _text(line: bytes, where: str) -> str:
    check_length(line, where)
    try:
        return line.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8 text: {error}") from None


def _json(path: Path, content: bytes) -> Iterator[Record]:
    if not content.strip():
        return
    hint = "for one object a line the name must end in .jsonl"
    try:
        rows = parse_json(content, str(path))
    except ValueError as error:
        raise ValueError(f"{error}; {hint}" if "Extra data" in str(error) else str(error)) from None
    if not isinstance(rows, list):
        raise ValueError(f"{path} must hold a list of conversations; {hint}")
    for number, row in enumerate(rows, 1):
        yield Record(f"{path} row {number}", row)


def _dataset(name: str, split: str, subset: str | None, streaming: bool) -> Iterator[Record]:
    path = Path(name)
    if not path.exists() and not HUB_NAME.fullmatch(name):
        raise ValueError(f"no such data file: {name}")
    if path.is_file() and path.suffix != ".parquet":
        raise ValueError(f"{name} is of no known form: the name must end in {', '.join(FILES)} or .parquet")
    try:
        import datasets
    except ImportError:
        raise ValueError(
            f"{name} is read with datasets, which is not installed: pip install 'specdec[data]', or give a file that "
            f"ends in {', '.join(FILES)}"
        ) from None
    try:
        if path.is_file():
            rows = datasets.load_dataset("parquet", data_files=name, split="train", streaming=streaming)
        elif (path / "state.json").is_file():  # written by save_to_disk
            rows = datasets.load_from_disk(name)
        elif (path / "dataset_dict.json").is_file():
            rows = datasets.load_from_disk(name)[split]
        else:
            rows = datasets.load_dataset(name, subset, split=split, streaming=streaming)
        for number, row in enumerate(rows, 1):
            yield Record(f"{name} ({split}) row {number}", row)
    except Exception as error:  # the hub, the network and the readers of formats raise any type
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"cannot read the data set {name}: {reason}") from None


def preset(name: str) -> dict[str, Any]:
    """Return the arguments of `read_records` for a name: those of conf/data/NAME.yaml if it exists, or the name."""
    file = files("specdec.conf") / "data" / f"{name}.yaml"
    settings: Any = OmegaConf.load(str(file)) if HUB_NAME.fullmatch(name) and file.is_file() else {}
    if not settings.get("path"):
        return {"name": name}
    return {"name": settings.path} | {key: settings[key] for key in ("split", "subset") if key in settings}
