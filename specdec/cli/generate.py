"""The command `specdec generate`, also `python -m specdec.generate`: its flags, and what they may not say together."""

import argparse
import json
import sys
from contextlib import nullcontext
from pathlib import Path

from specdec import ranks
from specdec.api import ModelSettings, Sampling
from specdec.cli.chat import chat
from specdec.cli.decoding import run_prompts
from specdec.cli.errors import one_sentence_errors
from specdec.cli.flags import add_flags, command_parser, read_flags
from specdec.cli.lock import only_writer
from specdec.cli.session import Session
from specdec.cli.settings import DRAFTING, NOT_A_TREE, parse_with_settings
from specdec.cli.summary import print_summary, summarise
from specdec.text import read_prompts
from specdec.trees.spec import TreeSettings
from specdec.tuning.engines import HELP
from specdec.verify import VerifierSettings


def parser() -> argparse.ArgumentParser:
    p = command_parser(
        "generate", "Decode speculatively, or plainly.", "(--prompt TEXT | --prompt-file FILE | --chat) [options]"
    )
    text = p.add_argument_group("prompts")
    text.add_argument("--prompt", metavar="TEXT", help="one prompt")
    text.add_argument(
        "--prompt-file",
        type=Path,
        metavar="FILE",
        help="a prompt a line; or .jsonl with `prompt`, `turns` or `messages`",
    )
    text.add_argument("--limit", type=int, help="of --prompt-file: only so many prompts")
    text.add_argument("--chat", action="store_true", help="talk to the target, with history")
    text.add_argument("--raw", action="store_true", help="do not apply the chat template")
    text.add_argument("--max-new-tokens", type=int, default=128, help="(default 128)")
    text.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be given repeatedly")
    text.add_argument("--json-schema", type=Path, metavar="FILE", help="answer in JSON that this schema describes")
    text.add_argument("--batch-size", type=int, default=1, help="prompts of --prompt-file decoded together (default 1)")
    model = p.add_argument_group("models")
    add_flags(model, ModelSettings)
    model.add_argument("--no-draft", action="store_true", help="decode plainly")
    model.add_argument("--no-graphs", action="store_true", help="on a GPU: do not replay rounds as CUDA graphs")
    model.add_argument("--compile", action="store_true", help="compile the rounds and cache them (docs/compile.md)")
    model.add_argument("--settings", type=Path, help="YAML of flags, as specdec tune writes; typed flags override it")
    sample = p.add_argument_group("sampling of the target")
    add_flags(sample, Sampling)
    sample.add_argument("--seed", type=int, default=0, help="of all draws (default 0)")
    tree = p.add_argument_group("draft tree and verification")
    add_flags(tree, TreeSettings)
    tree.add_argument("--recalibrate", action="store_true", help="for --tree auto: measure anew what rounds cost here")
    tree.add_argument("--adaptive", metavar="NAME", help=HELP)
    add_flags(tree, VerifierSettings)
    out = p.add_argument_group("output")
    out.add_argument("--show-trees", action="store_true", help="draw every tree, accepted nodes starred")
    out.add_argument("--compare", action="store_true", help="decode plainly too: ratio of speeds; identical?")
    out.add_argument("--trace", type=Path, metavar="FOLDER", help="write a trace of every round (docs/trace.md) there")
    out.add_argument("--logprobs", action="store_true", help="with --json: log-probabilities of the emitted tokens")
    out.add_argument("--json", action="store_true", help="one JSON object as the last line, instead of the summary")
    return p


def check_flags(args: argparse.Namespace) -> None:
    """Raise ValueError for flags that contradict each other."""
    given = [flag for flag in ("prompt", "prompt_file", "chat") if getattr(args, flag) not in (None, False)]
    if len(given) != 1:
        raise ValueError("give exactly one of --prompt, --prompt-file and --chat")
    if args.prompt is not None and not args.prompt.strip():
        raise ValueError("the prompt is empty; write something after --prompt")
    if args.limit is not None and args.prompt_file is None:
        raise ValueError("--limit counts the prompts of --prompt-file: give one")
    if args.no_draft:
        for flag in (*DRAFTING, "adaptive", "show_trees", "compare"):
            if getattr(args, flag) not in (None, False):
                raise ValueError(f"--{flag.replace('_', '-')} contradicts --no-draft")
    if args.tree is not None:
        for flag in NOT_A_TREE:
            if getattr(args, flag) not in (None, False):
                raise ValueError(f"--{flag.replace('_', '-')} contradicts --tree, which is a whole tree")
    if not args.no_draft:
        read_flags(ModelSettings, args).check_pair(", or --no-draft to decode plainly")
    if args.compile and args.no_graphs:
        raise ValueError("--no-graphs contradicts --compile: compiled rounds are replayed")
    if args.adaptive is not None and args.compile:
        raise ValueError("--adaptive contradicts --compile but in `specdec serve`: its rounds are eager")
    if args.chat and (args.json or args.compare or args.raw):
        raise ValueError("--chat goes with neither --json nor --compare nor --raw")
    if args.tp_plan is not None:
        for flag in ("chat", "adaptive", "recalibrate", "compile"):
            if getattr(args, flag) not in (None, False):
                raise ValueError(f"--{flag} contradicts --tp-plan: it is for a process alone")
    if args.logprobs and not args.json:
        raise ValueError("--logprobs are part of what --json prints: give both")
    if args.batch_size < 1:
        raise ValueError(f"--batch-size must be at least 1, got {args.batch_size}")
    if args.batch_size > 1 and args.show_trees:
        raise ValueError("--show-trees draws one sequence at a time: leave --batch-size at 1")


@one_sentence_errors
def main(argv: list[str] | None = None) -> None:
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="surrogateescape")  # as the command line's bytes that are not UTF-8 arrive
    args = parse_with_settings(parser(), argv)
    check_flags(args)
    ranks.share_output(args, "trace")
    prompts = [args.prompt] if args.prompt is not None else []
    if args.prompt_file is not None:
        prompts = read_prompts(args.prompt_file)[: args.limit]
    with nullcontext() if args.trace is None else only_writer(args.trace):
        decode(args, prompts)


def decode(args: argparse.Namespace, prompts: list[str]) -> None:
    """Load what the flags name, and answer the prompts, or chat. However it ends, the trace is of what was done by
    then."""
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
