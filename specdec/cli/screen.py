"""The text on the terminal while it is decoded, and the trees that it comes from."""

import os
import sys
from collections.abc import Sequence

from typing_extensions import override

from specdec.cli.drawing import draw
from specdec.engine.report import Observer, Reads, RoundReport
from specdec.text import TextStream

DRAFTED = "\033[32m"
PLAIN = "\033[0m"


class Screen(Observer):
    """An observer of rounds that prints the first row's text as it grows. On a terminal drafted tokens are green.

    quiet: print no text, as a batch of several rows needs. trees: draw every tree before its text.
    """

    def __init__(self, target, *, quiet: bool, trees: bool, stops: Sequence[str] = ()):
        """target: its tokenizer decodes the text. stops: strings that end the text and are not printed."""
        self.tokenizer, self.quiet, self.trees = target.tokenizer, quiet, trees
        self.reads = Reads.TREES if trees else Reads.TOKENS
        self.stream = TextStream(target.tokenizer, stops)
        self.colour = sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")

    @override
    def __call__(self, report: RoundReport) -> None:
        if self.trees and report.tree is not None:
            path = report.verdict.path[0, : int(report.verdict.n[0])].tolist()
            print("\n" + draw(report.tree, path, lambda token: self.tokenizer.decode([token])))
        if self.quiet:
            return
        emitted, accepted = report.emitted[0], report.accepted[0]
        self._show(emitted[:accepted], DRAFTED)
        self._show(emitted[accepted:], "")

    def end(self) -> None:
        """Print what was held back, the beginning of a stop string or of a character, and end the line."""
        if not self.quiet:
            print(self.stream.end())

    def _show(self, ids: list[int], colour: str) -> None:
        text = self.stream.feed(ids) if ids else ""
        if text:
            sys.stdout.write(f"{colour}{text}{PLAIN}" if colour and self.colour else text)
            sys.stdout.flush()
