"""Tables fit their terminal."""

import io
import os

import pytest
from rich.table import Table

from specdec.cli import terminal
from specdec.cli.terminal import console, print_table


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_a_table_is_no_wider_than_the_terminal(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    names = [f"heading{i} and words" for i in range(6)]
    table, out = Table(*names), io.StringIO()
    table.add_row(*["12345.678"] * 6)
    print_table(console(160, file=out), table, names[3:])
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    shown = out.getvalue().count("12345.678")
    assert shown == {40: 3, 60: 4, 80: 6, 200: 6}[width], "numbers stay whole"
    assert ("left out" in out.getvalue()) == (shown < 6)


def test_the_width_without_a_terminal(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    sizes = []

    def size(stream: int) -> os.terminal_size:
        if not sizes:
            raise OSError
        return os.terminal_size((sizes[0], 24))

    monkeypatch.setattr(os, "get_terminal_size", size)
    assert terminal.terminal_width() is None
    assert console(123).width == 123
    sizes.append(71)  # `| tee` leaves the other streams at the terminal
    assert terminal.terminal_width() == 71
