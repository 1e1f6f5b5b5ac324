"""Tables and colours on a terminal, by rich."""

import os
from collections.abc import Sequence
from contextlib import suppress

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table


class _Output(Console):
    def on_broken_pipe(self) -> None:
        raise  # the BrokenPipeError that is being handled: commands end with 0 then, and rich's own way is 1

    def print(self, *objects, **how) -> None:
        for column in (column for table in objects if isinstance(table, Table) for column in table.columns):
            column.overflow = "fold"  # rich would cut words, and numbers, and mark the cut with ...
        super().print(*objects, **how)


def terminal_width() -> int | None:
    """Return the width of the terminal, which pipes leave connected to another stream, or `COLUMNS`, or None."""
    if os.environ.get("COLUMNS", "").isdigit():
        return int(os.environ["COLUMNS"]) or None
    for stream in (1, 2, 0):
        with suppress(OSError):
            return os.get_terminal_size(stream).columns or None
    return None


def console(width: int | None = None, **how) -> Console:
    """Return rich's console as wide as the terminal, or `width` columns without one. It interprets no markup."""
    return _Output(width=terminal_width() or width or 80, markup=False, **how)


def print_table(screen: Console, table: Table, optional: Sequence[str] = ()) -> None:
    """Print a table no wider than the console. optional: columns to leave out, first to last, until words fit."""
    left_out: list[str] = []
    for name in optional:
        if Measurement.get(screen, screen.options.update_width(10_000), table).minimum <= screen.width:
            break
        table.columns = [column for column in table.columns if column.header != name]
        left_out.append(name)
    screen.print(table)
    if left_out:
        screen.print(f"left out on a terminal of {screen.width} columns: {'; '.join(left_out)}")
