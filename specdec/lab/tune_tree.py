"""Measure how often a drafter's children are right, by depth and rank; keep it for `--tree auto`, or write a tree.

    specdec tune tree --draft DRAFT --prompts questions.jsonl --keep
    specdec tune tree --prompts questions.jsonl --out tree.yaml
    specdec generate --prompts others.jsonl --tree tree.yaml

The target answers the prompts plainly, and the drafter drafts along these answers. --keep writes acceptance.json into
the drafter's folder, for the temperatures 0 and 1. --out writes the static tree of --num-draft-tokens nodes that
accepts the most. Give prompts that the drafter was not trained on, and test the tree on others.
"""

import argparse
import shlex
from pathlib import Path

from specdec.acceptance import FILE, Acceptance, AlongTexts
from specdec.cli.files import check_writable, write_text
from specdec.lab.models import load_models, read_encoded
from specdec.lab.output import stage
from specdec.model.names import resolve
from specdec.structs import Sampling
from specdec.trees.optimal import TEMPERATURES, expected_tau, optimal_paths
from specdec.trees.record import answers_to, record


def show(along: AlongTexts) -> None:
    """Print the conditional acceptance by depth and by rank of the child."""
    what = "conditional acceptance, of the places that reached a depth, by the child's rank 1, 2, ..."
    print(f"temperature {along.temperature:g}: {what}")
    for depth, row in enumerate(along.table(), 1):
        print(f"depth {depth}: " + "  ".join(f"{share:6.1%}" for share in row))


def run(args: argparse.Namespace) -> None:
    """Run `specdec tune tree`. Raises ValueError if no drafted token was measured."""
    stored = resolve(args.draft) / FILE if args.keep else None
    if stored is not None:
        check_writable(stored)
    target, drafter = load_models(args)
    if args.topk > drafter.vocab.size:
        raise ValueError(f"topk is {args.topk}, but the draft vocabulary has {drafter.vocab.size} tokens only")
    steps = drafter.deepest(args.steps)
    if args.out is not None:  # which refuses a number of nodes that no such tree has
        optimal_paths([[0.0] * args.topk] * steps, args.num_draft_tokens)
    prompts = read_encoded(target, args.prompts, args.limit, args.raw)
    about = f"{len(prompts)} prompts of {args.prompts.name}, {args.max_new_tokens} tokens"
    temperatures = sorted({args.temperature, *(TEMPERATURES if args.keep else ())})
    found = {}
    for t in temperatures:
        stage(f"decoding {len(prompts)} prompts at temperature {t:g}, and drafting along the answers")
        answers = answers_to(target, prompts, Sampling(t), max_new_tokens=args.max_new_tokens, seed=args.seed)
        recording = record(target, drafter, answers, steps=steps, sampling=Sampling(t))
        found[t] = recording.along(args.topk)
    if any(measured.empty for measured in found.values()):
        raise ValueError(
            "nothing was measured: every answer is one token long, and the first token is not drafted; "
            "raise --max-new-tokens, or give other prompts"
        )
    accept, along = found[args.temperature].table(), found[args.temperature]
    paths = [] if args.out is None else optimal_paths(accept, args.num_draft_tokens)
    try:
        if stored is not None:
            write_text(stored, Acceptance(tuple(found.values()), about).as_text())
        if args.out is not None:
            write_tree(args.out, paths, f"Of {about}: see specdec/lab/tune_tree.py")
    finally:  # measurements are shown even if they cannot be written, and written even if standard output is closed
        for measured in found.values():
            show(measured)
    if args.out is not None:
        print(
            f"{args.num_draft_tokens} nodes, {max(map(len, paths))} levels; expected tau "
            f"{expected_tau(paths, accept):.3f}, {along.tau(paths):.3f} along these answers"
        )
        pair = [w for name in ("target", "draft") if (value := getattr(args, name)) for w in (f"--{name}", value)]
        print(f"wrote {args.out}: specdec generate {shlex.join([*pair, '--tree', str(args.out)])}")
    if stored is not None:
        print(f"wrote {stored}")


def write_tree(file: Path, paths: list[tuple[int, ...]], comment: str) -> None:
    """Write a file that `--tree` takes, and conf/tree too."""
    lines = [f"# {comment}", "_target_: specdec.trees.StaticTree", "paths:"]
    lines += [f"  - {list(path)}" for path in sorted(paths, key=lambda path: (len(path), path))]
    write_text(file, "\n".join(lines) + "\n")
