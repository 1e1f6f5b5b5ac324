"""JSON lines that survive interruptions: the same command continues exactly after the last line."""

import json
from collections.abc import Iterable
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import BinaryIO

from specdec.cli.files import partial_path, put_in_place, write_text
from specdec.cli.lock import only_writer
from specdec.model.weight_files import read_json
from specdec.registry import read_yaml
from specdec.schema import shown

UNSTATED = {"matmul_precision": "highest"}  # settings of runs whose file does not state them


def record_of(out: Path) -> Path:
    """Return the file with the settings of a run that writes `out`."""
    return out.with_name(f"{out.stem}.run.json")


def begun_on(record: Path, today: bool = False) -> str | None:
    """Return the day (YYYY-MM-DD) in the settings of a run. Without one: None, or today's date if `today`."""
    settings = read_yaml(record, "settings") if record.is_file() else {}
    if not isinstance(settings, dict):
        raise ValueError(f"{record} is damaged: it holds no settings")
    begun = settings.get("day") or (settings.get("data") or {}).get("day")
    try:
        begun = begun and date.fromisoformat(str(begun)).isoformat()
    except ValueError:
        raise ValueError(f"{record}: day must be a date such as 2026-11-27, got {shown(begun)}") from None
    return begun or (date.today().isoformat() if today else None)


class Shards:
    """`rows` JSON lines in files of `size` lines: OUT itself, or OUT-00000-of-00003.jsonl and so on.

    A file ends in `.partial` until it is complete. OUT.run.json holds the settings that made the lines, so that only a
    run of the same settings continues them. `done` counts the existing lines.
    """

    file: BinaryIO  # the file of the shard that is written, in the `with` block

    def __init__(self, out: Path, rows: int, size: int | None, settings: dict, only: int | None = None):
        """only: the number of a file; others are somebody else's."""
        self.out, self.rows, self.size = out, rows, size or rows
        self.count = -(-rows // self.size)
        self.first, self.end = (0, self.count) if only is None else (only, only + 1)
        self.last = min(self.end * self.size, rows)  # one past the number of our last line
        self.record = record_of(out)
        self.settings = {"rows": rows, "shard_size": size} | settings

    def __enter__(self) -> "Shards":
        """Check the settings, and open the first incomplete file of this run."""
        try:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            with only_writer(self.record, wait=True):  # others may write other files at the same time
                self._check_settings()
            self.shard = self.first
            while self.shard < self.end and self.path(self.shard).exists():
                self.shard += 1
            self.done = min(self.shard * self.size, self.rows)
            if self.shard < self.end:
                self.done += _whole_lines(self._partial())
                self.file = self._partial().open("ab")
                self._close_full_shard()
        except OSError as error:
            raise self._cannot_write(error) from None
        return self

    def __exit__(self, *_) -> None:
        """Close the open file."""
        if self.shard < self.end:
            with suppress(OSError):  # `write` has flushed, or raised: closing would try again what did not fit
                self.file.close()

    def path(self, shard: int) -> Path:
        """Return the path of a complete file by its number."""
        if self.count == 1:
            return self.out
        return self.out.with_name(f"{self.out.stem}-{shard:05d}-of-{self.count:05d}{self.out.suffix}")

    def write(self, rows: Iterable[dict]) -> None:
        """Append rows. When this returns the system has them, and a kill does not lose them."""
        try:
            for row in rows:
                self.file.write((json.dumps(row, ensure_ascii=False) + "\n").encode())
                self.done += 1
                self._close_full_shard()
            if self.shard < self.end:
                self.file.flush()
        except OSError as error:
            raise self._cannot_write(error) from None

    def _close_full_shard(self) -> None:
        if self.done < min((self.shard + 1) * self.size, self.rows):
            return
        self.file.close()
        put_in_place(self.path(self.shard))
        self.shard += 1
        if self.shard < self.end:
            self.file = self._partial().open("ab")

    def _partial(self) -> Path:
        return partial_path(self.path(self.shard))

    def _check_settings(self) -> None:
        if not self.record.exists():
            for path in (self.path(0), partial_path(self.path(0))):
                if path.exists():
                    raise ValueError(f"{path} exists and was not made by this command: give another --out")
            write_text(self.record, json.dumps(self.settings, indent=1) + "\n")
            return
        try:
            begun = UNSTATED | read_json(self.record)
        except ValueError:
            raise ValueError(f"{self.record} is damaged: give another --out") from None
        for name, value in self.settings.items():
            if begun.get(name) != value:
                raise ValueError(
                    f"{self.out} was begun with {name} {begun.get(name)}, and this is {value}: give the same settings "
                    f"to go on with it, another --out, or remove it and {self.record.name}"
                )

    def _cannot_write(self, error: OSError) -> ValueError:
        return ValueError(
            f"cannot write {error.filename or self._partial()}: {error.strerror}; the lines written so far are "
            "complete, and the same command continues after them"
        )


def _whole_lines(path: Path) -> int:
    """The number of whole lines of a file. The beginning of a line that an interruption left at its end is removed."""
    if not path.exists():
        return 0
    lines = end = 0
    with path.open("rb+") as file:
        for line in file:
            if line.endswith(b"\n"):
                lines, end = lines + 1, end + len(line)
        file.truncate(end)
    return lines
