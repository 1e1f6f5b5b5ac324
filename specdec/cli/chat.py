"""`specdec generate --chat`: a conversation, turn by turn."""

import re
import signal
import sys

from specdec.cli.line_input import line_reader
from specdec.cli.screen import Screen
from specdec.cli.session import Session
from specdec.cli.signals import Terminated
from specdec.cli.summary import LOSSY, drafting
from specdec.engine.sequence import Sequence
from specdec.model.names import called
from specdec.text import clean, decode_row, encode_chat
from specdec.verify import in_words

COMMANDS = {"/reset": "begins a new conversation", "/exit": "ends"}
KEYS = "Ctrl-C stops an answer, Ctrl-D ends."


def chat(session: Session) -> None:
    """Read messages until the end of input, and answer each with the whole conversation as its prompt.

    Ctrl-C stops a running answer. At the prompt it raises KeyboardInterrupt.
    """
    if not session.target.tokenizer.chat_template:
        raise ValueError("--chat needs a tokenizer with a chat template, and this target's has none")
    print(banner(session))
    history: list[dict[str, str]] = []
    read = line_reader()
    while True:
        try:
            message = clean(read("> ")).strip()
        except EOFError:
            print()
            return
        if message == "/exit":
            return
        if message == "/reset":
            history.clear()
            print("a new conversation")
        elif re.fullmatch(r"/[a-z]+", message):
            print(f"there is no {message}: {_commands()}")
        elif message:
            _turn(session, history, message)


def banner(session: Session) -> str:
    """The names of target and drafter, and the commands of a chat."""
    lines = [f"chat with {called(session.target.name)}; {drafting(session)}"]
    if not session.verifier.lossless:
        lines.append(f"verifier: {in_words(session.verifier)}, {LOSSY}")
    return "\n".join([*lines, f"{_commands()} {KEYS}"])


def _commands() -> str:
    return ", ".join(f"{name} {does}" for name, does in COMMANDS.items()) + "."


def _turn(session: Session, history: list[dict[str, str]], message: str) -> None:
    """Answer a message, and append both to the history."""
    history.append({"role": "user", "content": message})
    try:
        row = _answer(session, history)
    except ValueError as error:  # too long by now: say so, and let the user start again
        print(f"error: {error}; starting a new conversation", file=sys.stderr)
        history.clear()
        return
    said = decode_row(session.target.tokenizer, row.tokens, session.stops)
    history.append({"role": "assistant", "content": said})


def _answer(session: Session, history: list[dict[str, str]]) -> Sequence:
    screen = Screen(session.target, quiet=False, trees=session.args.show_trees, stops=session.stops)
    with session.signals as signals:
        row = session.run([encode_chat(session.target, history)], screen, first=len(history) // 2).rows[0]
    screen.end()
    print(f"[{len(row.tokens)} tokens, {row.trace.rounds} rounds]")
    if signals.number == signal.SIGTERM:
        raise Terminated
    signals.number = None  # Ctrl-C stops an answer, and not the conversation
    return row
