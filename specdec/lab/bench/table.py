"""A benchmark's rows as a terminal table."""

from rich.table import Table

from specdec.cli.terminal import console

COLUMNS = (
    "", "tokens/s", "decoding", "step ms: P50, P95", "tokens a step", "first token ms", "cache, peak MiB",
    "of bandwidth", "to plain", "to transformers", "same text",
)  # fmt: skip
MIB = 2**20


def print_rows(rows: list[dict], title: str) -> None:
    """Print the rows by configuration; below the table, what was skipped or failed, and why."""
    table = Table(title=title, caption="tokens/s: end to end; decoding: without prompt and first token")
    for column in COLUMNS:
        table.add_column(column, justify="right" if column else "left", no_wrap=not column)
    for i, row in enumerate(rows):
        if i == 0 or rows[i - 1]["configuration"] != row["configuration"]:
            table.add_section()
            table.add_row(f"[bold]{row['configuration']}")
        table.add_row(*_cells(row))
    screen = console(170)
    screen.print(table)
    for remark, where in remarks(rows).items():
        screen.print(f"{remark} ({', '.join(where)})", markup=False, highlight=False)


def remarks(rows: list[dict]) -> dict[str, list[str]]:
    """Remarks, each with the configurations that it is about."""
    out: dict[str, list[str]] = {}
    for row in rows:
        for kind in ("failed", "skipped", "note", "differs"):
            if kind in row:
                out.setdefault(f"{row['contender']}, {kind}: {row[kind]}", []).append(row["configuration"])
    return out


def _cells(row: dict) -> list[str]:
    name = f"  {row['contender']}"
    if "tokens_per_second" not in row:
        return [name, "failed" if "failed" in row else "skipped"]
    if "note" in row:
        name += " *"
    step = row.get("step_ms")
    return [
        name,
        f"{row['tokens_per_second']:.1f}",
        _number(row, "decode_tokens_per_second", ".1f"),
        f"{step['p50']:.2f}, {step['p95']:.2f}" if step else "",
        _number(row, "tokens_per_step", ".2f"),
        f"{row['time_to_first_token_ms']:.1f}",
        f"{row['cache_bytes'] / MIB:.1f}, {row['peak_bytes'] / MIB:.0f}",
        _number(row, "share_of_bandwidth", ".0%"),
        _number(row, "to_plain", ".2f"),
        _number(row, "to_transformers", ".2f"),
        row.get("same_text_as_plain", ""),
    ]


def _number(row: dict, name: str, form: str) -> str:
    return format(row[name], form) if name in row else ""
