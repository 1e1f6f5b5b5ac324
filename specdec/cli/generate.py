"""Decode speculatively, or plainly."""

import argparse
import json
import sys
from contextlib import nullcontext
from typing import Any

from specdec import ranks
from specdec.cli.chat import chat
from specdec.cli.decoding import run_prompts
from specdec.cli.lock import only_writer
from specdec.cli.session import Session
from specdec.cli.summary import print_summary, summarise
from specdec.text import read_prompts


def run(args: argparse.Namespace) -> None:
    """Run `specdec generate`: read the prompts, decode them or chat, and write the trace if one was asked for."""
    output: Any = sys.stdout
    if hasattr(output, "reconfigure"):
        output.reconfigure(errors="replace")
    words: Any = sys.stdin
    if hasattr(words, "reconfigure"):
        words.reconfigure(errors="surrogateescape")  # as the command line's bytes that are not UTF-8 arrive
    ranks.share_output(args, "trace")
    prompts = [args.prompt] if args.prompt is not None else []
    if args.prompts is not None:
        prompts = read_prompts(args.prompts)[: args.limit]
    with nullcontext() if args.trace is None else only_writer(args.trace):
        decode(args, prompts)


def decode(args: argparse.Namespace, prompts: list[str]) -> None:
    """Load the models that the flags name, then answer the prompts or chat. A trace is written even after an error."""
    session = Session(args, prompts)
    if session.choice is not None:
        print(session.choice, file=sys.stderr)
    try:
        if args.chat:
            chat(session)
        else:
            answer_all(session)
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
        print(
            f"stopped: {begun} of {len(session.prompts)} prompts were begun, and what they gave is above",
            file=sys.stderr,
        )
        sys.exit(signals.code)
