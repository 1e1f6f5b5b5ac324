"""The checkpoint doctor: draft checkpoints say less than they mean.

It reads them strictly, says every convention in force, tries other readings, and writes other layouts bit for bit.
`specdec doctor COMMAND --help` says more of one; `python -m specdec.drafters.formats` is the same.
"""

import argparse
import json
import sys
from pathlib import Path

from specdec.api import ModelSettings
from specdec.cli.errors import one_sentence_errors
from specdec.cli.flags import HelpFormatter, add_flags, command_parser, read_flags
from specdec.drafters.formats import FAMILIES, Checkpoint, check, description, verdict, vllm
from specdec.drafters.formats.convert import SERVERS, convert, export, start_command
from specdec.drafters.formats.prompts import PROMPTS
from specdec.model.names import bundled
from specdec.model.weight_files import read_json
from specdec.text import read_prompts


def parser() -> argparse.ArgumentParser:
    p = command_parser("doctor", __doc__, "(inspect | check | convert | export) [options]")
    commands = p.add_subparsers(dest="command", required=True, title="commands", metavar="COMMAND", prog=p.prog)
    one = _command(commands, "inspect", "family, layout, every convention in force, and what is wrong with it")
    one.add_argument("path", help="folder or hub name of a drafter")
    one.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    one = _command(commands, "check", "does the drafter do better when its checkpoint is read another way?")
    add_flags(one, ModelSettings, "target", "draft", "allow_nonfinite", "dtype", "device", required=("target", "draft"))
    one.add_argument("--prompt-file", type=Path, help="a prompt a line, or .jsonl (default: built-in prompts)")
    one.add_argument("--raw", action="store_true", help="do not apply the chat template")
    one.add_argument("--max-new-tokens", type=int, default=64, help="(default 64)")
    one.add_argument("--steps", type=int, default=5, help="length of the drafted chain (default 5)")
    one.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    names = sorted({layout.name for layouts in FAMILIES.values() for layout in layouts})
    one = _command(commands, "convert", "write a checkpoint in another layout, bit for bit")
    one.add_argument("--to", required=True, metavar="LAYOUT", help=", ".join(names))
    one.add_argument("--int8", action="store_true", help="round matrices to int8, a scale a row; only specdec reads it")
    _paths(one)
    one = _command(commands, "export", "write a checkpoint as a server loads it")
    one.add_argument("--for", dest="server", required=True, choices=SERVERS)
    _paths(one)
    return p


def _command(commands, name: str, does: str) -> argparse.ArgumentParser:
    return commands.add_parser(
        name, help=does, description=f"{does[0].upper()}{does[1:]}", formatter_class=HelpFormatter
    )


def _paths(command: argparse.ArgumentParser) -> None:
    command.add_argument("--target", help="folder or hub name of the target, where the layout speaks of it")
    command.add_argument("source", help="folder or hub name of a drafter")
    command.add_argument("destination", type=Path, help="folder to write")


@one_sentence_errors
def main(arguments: list[str] | None = None) -> None:
    args = parser().parse_args(arguments)
    if args.command == "inspect":
        report = description.inspect(args.path)
        print(json.dumps(report) if args.json else description.as_text(report))
    elif args.command == "check":
        report = _check(args)
        print(json.dumps(verdict.as_json(report)) if args.json else verdict.as_text(report))
        if report.declared.refused:
            sys.exit(2)
    elif args.command == "convert":
        done = convert(args.source, args.destination, args.to, args.target, args.int8)
        _warn(done)
        print(f"{done.layout.title} -> {args.to}: {args.destination}")
    else:
        done = export(args.source, args.destination, args.server, args.target)
        _warn(done)
        print(f"for {args.server}: {args.destination}")
        if start := start_command(args.server, done, args.destination, bundled(args.target or "TARGET")):
            print(f"try it: {start}")
        for note in vllm.notes(read_json(args.destination / "config.json")):
            print(f"note: {note}")


def _check(args: argparse.Namespace) -> check.Report:
    models = read_flags(ModelSettings, args)
    prompts = read_prompts(args.prompt_file) if args.prompt_file else PROMPTS
    return check.check(
        models.load_target(),
        args.draft,
        prompts,
        max_new_tokens=args.max_new_tokens,
        steps=args.steps,
        raw=args.raw,
        allow_nonfinite=args.allow_nonfinite,
    )


def _warn(checkpoint: Checkpoint) -> None:
    for doubt in checkpoint.doubts:
        print(f"warning: {checkpoint.path}: {doubt}", file=sys.stderr)


if __name__ == "__main__":
    main()
