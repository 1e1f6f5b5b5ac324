"""Inspect, check, convert and export draft checkpoints.

    specdec checkpoint inspect DRAFT
    specdec checkpoint check --target TARGET --draft DRAFT
    specdec checkpoint convert --to speculators --target TARGET DRAFT OUT
    specdec checkpoint export --for vllm --target TARGET DRAFT OUT

docs/checkpoints.md lists the layouts.
"""

import argparse
import json
import sys

from specdec.api import ModelSettings
from specdec.cli.parser import read_flags
from specdec.drafters.formats import check, description, verdict, vllm
from specdec.drafters.formats.convert import convert, export, start_command
from specdec.model.names import public_name
from specdec.model.weight_files import read_json
from specdec.text import read_prompts


def run(args: argparse.Namespace) -> None:
    """One of the four commands `specdec checkpoint NAME`."""
    name = args.command.split()[1]
    if name == "inspect":
        found = description.inspect(args.draft)
        print(json.dumps(found) if args.json else description.as_text(found))
    elif name == "check":
        report = check.check(
            read_flags(ModelSettings, args).load_target(),
            args.draft,
            read_prompts(args.prompts or check.PROMPTS),
            max_new_tokens=args.max_new_tokens,
            steps=args.steps,
            raw=args.raw,
            allow_nonfinite=args.allow_nonfinite,
        )
        print(json.dumps(verdict.as_json(report)) if args.json else verdict.as_text(report))
        if report.declared.refused:
            sys.exit(2)
    else:
        server = getattr(args, "for", "")
        if name == "convert":
            done = convert(args.draft, args.out, args.to, args.target, args.int8)
        else:
            done = export(args.draft, args.out, server, args.target)
        for doubt in done.doubts:
            print(f"warning: {done.path}: {doubt}", file=sys.stderr)
        if name == "convert":
            print(f"{done.layout.title} -> {args.to}: {args.out}")
            return
        print(f"for {server}: {args.out}")
        if start := start_command(server, done, args.out, public_name(args.target or "TARGET")):
            print(f"try it: {start}")
        for note in vllm.notes(read_json(args.out / "config.json")):
            print(f"note: {note}")
