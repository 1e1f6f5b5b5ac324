"""Decode speculatively, or plainly."""

import argparse
import json
import re
import signal
import sys
from contextlib import nullcontext
from io import TextIOWrapper

from specdec import ranks
from specdec.cli.errors import Terminated
from specdec.cli.lock import only_writer
from specdec.cli.screen import Screen, line_reader
from specdec.cli.session import Session, run_prompts
from specdec.cli.summary import LOSSY, drafting, print_summary, summarise
from specdec.model.names import called
from specdec.text import clean, decode_row, encode_chat, read_prompts
from specdec.verify import in_words

COMMANDS = "/reset begins a new conversation, /exit ends."


def run(args: argparse.Namespace) -> None:
    """Run `specdec generate`: read the prompts, decode them or chat, and write the trace if one was asked for."""
    # Bytes that are not UTF-8 arrive as those of the command line do.
    for stream, errors in ((sys.stdout, "replace"), (sys.stdin, "surrogateescape")):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=errors)
    ranks.share_output(args, "trace")
    prompts = [args.prompt] if args.prompt is not None else []
    if args.prompts is not None:
        prompts = read_prompts(args.prompts)[: args.limit]
    with nullcontext() if args.trace is None else only_writer(args.trace):
        session = Session(args, prompts)
        if session.choice is not None:
            print(session.choice, file=sys.stderr)
        try:
            chat(session) if args.chat else answer_all(session)
        finally:  # even if standard output is closed
            session.write_trace()


def answer_all(session: Session) -> None:
    """Answer the session's prompts and print the summary. A signal ends the process, with what was done by then."""
    with session.signals as signals:
        decoded = run_prompts(session)
    if decoded.done:
        summary = summarise(session, decoded)
        if session.args.json:
            print(json.dumps(summary))
        else:
            print_summary(session, summary)
    if signals.asked:
        begun = sum(len(part.rows) for part in decoded.done)
        done = f"{begun} of {len(session.prompts)} prompts were begun"
        print(f"stopped: {done}, and what they gave is above", file=sys.stderr)
        sys.exit(signals.code)


# A conversation, turn by turn: --chat


def chat(session: Session) -> None:
    """Answer messages with the whole conversation as the prompt. Ctrl-C stops an answer, or ends at the prompt."""
    if not session.target.tokenizer.chat_template:
        raise ValueError("--chat needs a tokenizer with a chat template, and this target's has none")
    print(f"chat with {called(session.target.name)}; {drafting(session)}")
    if not session.verifier.lossless:
        print(f"verifier: {in_words(session.verifier)}, {LOSSY}")
    print(f"{COMMANDS} Ctrl-C stops an answer, Ctrl-D ends.")
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
            print(f"there is no {message}: {COMMANDS}")
        elif message:
            _turn(session, history, message)


def _turn(session: Session, history: list[dict[str, str]], message: str) -> None:
    """Answer a message, and append both to the history."""
    history.append({"role": "user", "content": message})
    screen = Screen(session.target, quiet=False, trees=session.args.show_trees, stops=session.stops)
    try:
        with session.signals as signals:
            row = session.run([encode_chat(session.target, history)], screen, first=len(history) // 2).rows[0]
    except ValueError as error:  # too long by now: say so, and let the user start again
        print(f"error: {error}; starting a new conversation", file=sys.stderr)
        history.clear()
        return
    screen.end()
    print(f"[{len(row.tokens)} tokens, {row.trace.rounds} rounds]")
    if signals.number == signal.SIGTERM:
        raise Terminated
    signals.number = None  # Ctrl-C stops an answer, and not the conversation
    said = decode_row(session.target.tokenizer, row.tokens, session.stops)
    history.append({"role": "assistant", "content": said})
