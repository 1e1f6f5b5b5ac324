"""Files as they look after manual edits: seeded changes to valid files of JSON or JSON lines."""

import json
import random
from collections.abc import Iterator

GONE = object()  # removes the entry
VALUES = (
    "64", "", "[/b]$", "\ud800", None, True, -1, 0, 1.5, -(2**70), 10**30, "HUGE", float("nan"), float("inf"), 1e308,
    [], [1], [[]], [["a"]], {}, {"a": {}}, GONE,
)  # fmt: skip


def edited(content: bytes, count: int, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """Yield what was changed, and a changed file: one place of JSON or of a line of JSON lines, or the bytes."""
    draws = random.Random(seed)
    try:
        lines = [json.loads(content)]
    except json.JSONDecodeError:
        lines = [json.loads(line) for line in content.splitlines()]
    for name, new in _rough(content, draws):
        yield name, new
    for _ in range(count):
        number = draws.randrange(len(lines))
        name, line = _changed(lines[number], draws)
        some = [*lines[:number], *([] if line is GONE else [line]), *lines[number + 1 :]]
        yield f"line {number + 1}{name}", b"".join(_dumped(one) + b"\n" for one in some)


def _dumped(value: object) -> bytes:
    return json.dumps(value).encode().replace(b'"HUGE"', b"9" * 5000)  # NaN and Infinity as Python writes them


def _changed(value, draws: random.Random) -> tuple[str, object]:
    """Change one place of a nested value, or the value itself."""
    inner = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    if not inner or draws.random() < 0.1:
        new = draws.choice(VALUES)
        return f" = {'gone' if new is GONE else repr(new)}", new
    key, below = draws.choice(inner)
    name, new = _changed(below, draws)
    rest = [(k, v) for k, v in inner if k != key] + ([] if new is GONE else [(key, new)])
    return f".{key}{name}", dict(rest) if isinstance(value, dict) else [
        v for _, v in sorted(rest, key=lambda kv: kv[0])
    ]


def _rough(content: bytes, draws: random.Random) -> Iterator[tuple[str, bytes]]:
    yield "empty", b""
    yield "a byte order mark", b"\xef\xbb\xbf" + content
    yield "UTF-16", content.decode("utf-8", "replace").encode("utf-16")
    yield "nested", b"[" * 100_000
    yield "a long line", b" " * (5 << 20) + content
    for _ in range(3):
        place = draws.randrange(len(content))
        yield f"cut at {place}", content[:place]
        yield f"no character at {place}", content[:place] + b"\xff" + content[place + 1 :]
