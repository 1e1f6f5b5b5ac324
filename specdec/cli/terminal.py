"""Tables and colours on a terminal, by rich."""

import sys

from rich.console import Console


class _Output(Console):
    def on_broken_pipe(self) -> None:
        raise  # the BrokenPipeError that is being handled: commands end with 0 then, and rich's own way is 1


def console(width: int | None = None) -> Console:
    """A console as wide as the terminal, or `width` characters wide where the output is no terminal. It prints names as
    they are: "[/b]" is no markup."""
    return _Output(width=None if sys.stdout.isatty() else width, markup=False)
