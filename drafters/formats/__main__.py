"""python -m drafters.formats inspect | check | convert | export: the checkpoint doctor."""

import argparse
import json
from pathlib import Path

from drafters.formats import FAMILIES, check, inspect
from drafters.formats.convert import SERVERS, convert, export
from specdec.cli.errors import one_sentence_errors
from specdec.model.loader import load_target
from specdec.text import read_prompts


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m drafters.formats", description="Look at draft checkpoints, strictly.")
    commands = p.add_subparsers(dest="command", required=True)
    one = commands.add_parser("inspect", help="family, layout and every convention in force, from the headers alone")
    one.add_argument("path", help="folder or hub name of a drafter")
    one.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    one = commands.add_parser("check", help="does the drafter do better when its checkpoint is read another way?")
    one.add_argument("--target", required=True, help="folder or hub name of the target")
    one.add_argument("--draft", required=True, help="folder or hub name of its drafter")
    one.add_argument("--prompt-file", type=Path, help="a prompt a line, or .jsonl (default: four built-in prompts)")
    one.add_argument("--raw", action="store_true", help="do not apply the chat template")
    one.add_argument("--max-new-tokens", type=int, default=64)
    one.add_argument("--steps", type=int, default=5, help="length of the drafted chain")
    one.add_argument("--dtype", default="auto", help="auto (fp32 on the CPU, else the target's), fp32, fp16, bf16")
    one.add_argument("--device", default="cpu", help="cpu (default), cuda, cuda:1, ...")
    one.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    names = sorted({layout.name for layouts in FAMILIES.values() for layout in layouts})
    one = commands.add_parser("convert", help="write a checkpoint in another layout, bit for bit")
    one.add_argument("--to", required=True, metavar="LAYOUT", help=", ".join(names))
    _paths(one)
    one = commands.add_parser("export", help="write a checkpoint as a server loads it")
    one.add_argument("--for", dest="server", required=True, choices=SERVERS)
    _paths(one)
    return p


def _paths(command: argparse.ArgumentParser) -> None:
    command.add_argument("--target", help="folder or hub name of the target, where the layout speaks of it")
    command.add_argument("source", help="folder or hub name of a drafter")
    command.add_argument("destination", type=Path, help="folder to write")


@one_sentence_errors
def main(arguments: list[str] | None = None) -> None:
    args = parser().parse_args(arguments)
    if args.command == "inspect":
        report = inspect.inspect(args.path)
        print(json.dumps(report) if args.json else inspect.as_text(report))
    elif args.command == "check":
        target = load_target(args.target, dtype=args.dtype, device=args.device)
        prompts = read_prompts(args.prompt_file) if args.prompt_file else check.PROMPTS
        outcomes = check.check(
            target, args.draft, prompts, max_new_tokens=args.max_new_tokens, steps=args.steps, raw=args.raw
        )
        print(json.dumps(check.as_json(outcomes)) if args.json else check.as_text(outcomes))
    elif args.command == "convert":
        done = convert(args.source, args.destination, args.to, args.target)
        print(f"{done.layout.title} -> {args.to}: {args.destination}")
    else:
        export(args.source, args.destination, args.server, args.target)
        print(f"for {args.server}: {args.destination}")


if __name__ == "__main__":
    main()
