"""A benchmark's rows as a terminal table."""

from collections.abc import Callable

from rich.table import Table
from rich.text import Text

from specdec.cli.terminal import console, print_table

MIB = 2**20


def number(name: str, form: str) -> Callable[[dict], str]:
    """Return a function that formats a row's entry `name`, or returns '' if the row lacks it."""
    return lambda row: format(row[name], form) if name in row else ""


COLUMNS: dict[str, Callable[[dict], str]] = {
    "": lambda row: f"  {row['contender']}{' *' * ('note' in row)}",
    "tokens/s": number("tokens_per_second", ".1f"),
    "decoding": number("decode_tokens_per_second", ".1f"),
    "step ms: P50, P95": lambda row: "{p50:.2f}, {p95:.2f}".format(**row["step_ms"]) if "step_ms" in row else "",
    "tokens a step": number("tokens_per_step", ".2f"),
    "first token ms": number("time_to_first_token_ms", ".1f"),
    "cache, peak MiB": lambda row: f"{row['cache_bytes'] / MIB:.1f}, {row['peak_bytes'] / MIB:.0f}",
    "of bandwidth": number("share_of_bandwidth", ".0%"),
    "to plain": number("to_plain", ".2f"),
    "to transformers": number("to_transformers", ".2f"),
    "same text": lambda row: row.get("same_text_as_plain", ""),
}

OPTIONAL = ("of bandwidth", "cache, peak MiB", "first token ms", "step ms: P50, P95", "decoding", "tokens a step")


def print_rows(rows: list[dict], title: str) -> None:
    """Print the rows by configuration; below the table, what was skipped or failed, and why."""
    table = Table(title=title, caption="tokens/s: end to end; decoding: without prompt and first token")
    for column in COLUMNS:
        table.add_column(column, justify="right" if column else "left", no_wrap=not column)
    before = None
    for row in rows:
        if row["configuration"] != before:
            before = row["configuration"]
            table.add_section()
            table.add_row(Text(before, "bold"))
        if "tokens_per_second" in row:
            table.add_row(*(cell(row) for cell in COLUMNS.values()))
        else:
            table.add_row(f"  {row['contender']}", "failed" if "failed" in row else "skipped")
    screen = console(170)
    print_table(screen, table, OPTIONAL)
    for remark, where in remarks(rows).items():
        screen.print(f"{remark} ({', '.join(where)})", highlight=False)


def remarks(rows: list[dict]) -> dict[str, list[str]]:
    """Remarks, each with the configurations that it is about."""
    out: dict[str, list[str]] = {}
    for row in rows:
        for kind in ("failed", "skipped", "cut", "note", "differs"):
            if kind in row:
                out.setdefault(f"{row['contender']}, {kind}: {row[kind]}", []).append(row["configuration"])
    return out
