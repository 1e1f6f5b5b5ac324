"""Conversations: read them from ShareGPT or OpenAI files, render them with the target's chat template, find what to train on."""

import json
import lzma
from collections.abc import Iterator
from pathlib import Path

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
         "bing": "assistant", "bard": "assistant", "system": "system"}  # fmt: skip


def read_conversations(path: str | Path) -> Iterator[list[dict[str, str]]]:
    """Yield each conversation of a `.json`, `.jsonl` or `.jsonl.xz` file as OpenAI messages.

    Rows are ShareGPT (`conversations: [{from, value}]`) or OpenAI (`messages: [{role, content}]`).
    Raises ValueError for a file that cannot be read as either, naming the row.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"no such data file: {path}")
    opener = lzma.open if path.suffix == ".xz" else open
    try:
        with opener(path, "rt", encoding="utf-8", newline="\n") as lines:
            if path.suffix == ".json":
                rows = enumerate(json.load(lines), 1)
            else:
                rows = ((n, json.loads(line)) for n, line in enumerate(lines, 1) if line.strip())
            for number, row in rows:
                yield _messages(row, f"{path} row {number}")
    except (json.JSONDecodeError, UnicodeDecodeError, lzma.LZMAError) as error:
        raise ValueError(f"{path} is not valid JSON lines of conversations: {error}") from None


def _messages(row: dict, where: str) -> list[dict[str, str]]:
    if not isinstance(row, dict) or not ("conversations" in row or "messages" in row):
        raise ValueError(f"{where} has neither 'conversations' (ShareGPT) nor 'messages' (OpenAI)")
    turns = row.get("conversations") or row.get("messages") or []
    messages = []
    for turn in turns:
        role = ROLES.get(turn.get("from", turn.get("role")))
        if role is None:
            raise ValueError(f"{where} has a turn by {turn.get('from', turn.get('role'))!r}; known are {sorted(ROLES)}")
        messages.append({"role": role, "content": turn.get("value", turn.get("content")) or ""})
    return messages
