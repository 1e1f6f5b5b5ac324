"""The text on the terminal while it is decoded, the trees that it comes from, and the lines that a person types."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from typing_extensions import override

from specdec.engine.report import Observer, Reads, RoundReport
from specdec.structs import DraftTree
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


def draw(tree: DraftTree, path: list[int], decode) -> str:
    """Draw the tree of the first row: each node's text, the probability of its path, and a star if it was accepted.

    path: the accepted nodes. decode: maps a token id to text.
    """
    tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
    shares = None if tree.logq is None else tree.logq[0].exp().tolist()

    def label(node: int) -> str:
        share = "" if shares is None or node == 0 else f"  {shares[node]:.2f}"
        return f"{decode(tokens[node])!r}{share}{' *' if node in path else ''}"

    def below(node: int, indent: str) -> Iterator[str]:
        children = [child for child in range(1, len(tokens)) if parents[child] == node]
        for child in children:
            last = child == children[-1]
            yield f"{indent}{'`-- ' if last else '|-- '}{label(child)}"
            yield from below(child, indent + ("    " if last else "|   "))

    return "\n".join([label(0), *below(0, "")])


def line_reader() -> Callable[[str], str]:
    """What asks for a line, after a prompt, and raises EOFError at the end of input.

    On a terminal prompt_toolkit edits the line if it is installed, else readline. Elsewhere lines are read as they are.
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
