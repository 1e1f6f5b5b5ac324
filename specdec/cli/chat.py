"""`specdec generate --chat`: a conversation, turn by turn."""

import sys

from specdec.cli.screen import Screen
from specdec.cli.session import Session
from specdec.cli.summary import LOSSY
from specdec.engine.sequence import Sequence
from specdec.text import StopStrings, clean, decode_row, encode_chat


def chat(session: Session) -> None:
    """Read messages until the end of input; the history grows with each answer."""
    if not session.target.tokenizer.chat_template:
        raise ValueError("--chat needs a tokenizer with a chat template, and this target's has none")
    if not session.verifier.lossless:
        print(f"verifier: {session.verifier}, {LOSSY}")
    history: list[dict[str, str]] = []
    while True:
        try:
            message = clean(input("> ")).strip()
        except EOFError:
            print()
            return
        if not message:
            continue
        history.append({"role": "user", "content": message})
        try:
            row = _answer(session, history)
        except ValueError as error:  # too long by now: say so, and let the user start again
            print(f"error: {error}; starting a new conversation", file=sys.stderr)
            history.clear()
            continue
        said = decode_row(session.target.tokenizer, row.tokens, session.stops)
        history.append({"role": "assistant", "content": said})


def _answer(session: Session, history: list[dict[str, str]]) -> Sequence:
    args = session.args
    screen = Screen(session.target, quiet=False, trees=args.show_trees, stops=session.stops)
    result = session.engine.generate(
        [encode_chat(session.target, history)],
        max_new_tokens=args.max_new_tokens,
        sampling=session.sampling,
        stop=[StopStrings(session.target.tokenizer, session.stops) if session.stops else None],
        seed=[(args.seed, len(history) // 2)],
        observer=session.observer(screen),
    )
    row = result.rows[0]
    screen.end()
    print(f"[{len(row.tokens)} tokens, {row.trace.rounds} rounds]")
    return row
