"""A line that a person types: with editing and history where the terminal allows it."""

import sys
from collections.abc import Callable
from contextlib import suppress


def line_reader() -> Callable[[str], str]:
    """What asks for a line, after a prompt, and raises EOFError at the end of input.

    On a terminal prompt_toolkit edits the line if it is installed (pip install 'specdec[chat]'), else readline, as
    Python's own prompt does. Elsewhere lines are read as they are.
    """
    if sys.stdin.isatty() and sys.stdout.isatty():
        try:
            from prompt_toolkit import PromptSession
        except ImportError:
            with suppress(ImportError):
                import readline  # noqa: F401  (`input` edits lines from now on)
        else:
            return PromptSession().prompt
    return lambda prompt: input(prompt)
