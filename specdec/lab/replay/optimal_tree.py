"""Measure how often a drafter's children are right, by depth and rank; keep it for `--tree auto`, or write a tree.

    specdec tree --draft DRAFT --prompt-file questions.jsonl --keep
    specdec tree --prompt-file questions.jsonl --out tree.yaml
    specdec generate --prompt-file others.jsonl --tree tree.yaml

The target answers the prompts plainly, and the drafter drafts along these answers. --keep writes acceptance.json into
the drafter's folder, for the temperatures 0 and 1. --out writes the static tree of --num-draft-tokens nodes that
accepts the most. Give prompts that the drafter was not trained on, and test the tree on others.
"""

import argparse
from pathlib import Path

from specdec.acceptance import DIGITS, FILE, Acceptance, AlongTexts
from specdec.cli.errors import one_sentence_errors
from specdec.cli.files import check_writable, write_text
from specdec.cli.flags import command_parser
from specdec.lab.models import add_model_flags, add_prompt_flags, check_counts, load_models, read_encoded
from specdec.structs import Sampling
from specdec.trees.optimal import TEMPERATURES, expected_tau, optimal_paths
from specdec.trees.record import answers_to, record


def parser() -> argparse.ArgumentParser:
    p = command_parser("tree", __doc__, "--prompt-file FILE (--keep | --out FILE) [options]")
    add_model_flags(p.add_argument_group("models"))
    add_prompt_flags(p.add_argument_group("answers"), limit=20, max_new_tokens=128)
    tree = p.add_argument_group("tree")
    tree.add_argument("--num-draft-tokens", type=int, default=16, help="nodes, the root counted (default 16)")
    tree.add_argument("--steps", type=int, default=8, help="no node is deeper, nor than the drafter goes (default 8)")
    tree.add_argument("--topk", type=int, default=8, help="no node has more children (default 8)")
    tree.add_argument("--out", type=Path, help="a YAML file for `specdec generate --tree`")
    tree.add_argument("--keep", action="store_true", help=f"write {FILE} into the drafter's folder, for --tree auto")
    return p


def check_flags(args: argparse.Namespace) -> None:
    check_counts(args, "limit", "max_new_tokens", "num_draft_tokens", "steps", "topk")
    if not args.keep and args.out is None:
        raise ValueError("give --keep, --out FILE or both: what shall be written?")
    if args.topk > len(DIGITS):
        raise ValueError(f"--topk must be {len(DIGITS)} at most, got {args.topk}")
    if args.keep and not (args.draft and Path(args.draft).is_dir()):
        raise ValueError("--keep writes into the drafter's folder: give it as --draft FOLDER")
    for file in (args.out, Path(args.draft) / FILE if args.keep else None):
        if file is not None:
            check_writable(file)


def show(along: AlongTexts) -> None:
    what = "conditional acceptance, of the places that reached a depth, by the child's rank 1, 2, ..."
    print(f"temperature {along.temperature:g}: {what}")
    for depth, row in enumerate(along.table(), 1):
        print(f"depth {depth}: " + "  ".join(f"{share:6.1%}" for share in row))


@one_sentence_errors
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    check_flags(args)
    target, drafter = load_models(args)
    if args.topk > drafter.vocab.size:
        raise ValueError(f"topk is {args.topk}, but the draft vocabulary has {drafter.vocab.size} tokens only")
    prompts = read_encoded(target, args.prompt_file, args.limit, args.raw)
    about = f"{len(prompts)} prompts of {args.prompt_file.name}, {args.max_new_tokens} tokens"
    temperatures = sorted({args.temperature, *(TEMPERATURES if args.keep else ())})
    found = {}
    for t in temperatures:
        answers = answers_to(target, prompts, Sampling(t), max_new_tokens=args.max_new_tokens, seed=args.seed)
        recording = record(target, drafter, answers, steps=drafter.deepest(args.steps), sampling=Sampling(t))
        found[t] = recording.along(args.topk)
    if any(measured.empty for measured in found.values()):
        raise ValueError(
            "nothing was measured: every answer is one token long, and the first token is not drafted; "
            "raise --max-new-tokens, or give other prompts"
        )
    accept, along = found[args.temperature].table(), found[args.temperature]
    paths = optimal_paths(accept, args.num_draft_tokens)
    try:
        if args.keep:
            write_text(Path(args.draft) / FILE, Acceptance(tuple(found.values()), about).as_text())
        if args.out is not None:
            write_tree(args.out, paths, f"Of {about}: see specdec/lab/replay/optimal_tree.py")
    finally:  # measurements are shown even if they cannot be written, and written even if standard output is closed
        for measured in found.values():
            show(measured)
    if args.out is not None:
        print(
            f"{args.num_draft_tokens} nodes, {max(map(len, paths))} levels; expected tau "
            f"{expected_tau(paths, accept):.3f}, {along.tau(paths):.3f} along these answers"
        )
        pair = [f"--{name} {value} " for name in ("target", "draft") if (value := getattr(args, name)) is not None]
        print(f"wrote {args.out}: specdec generate {''.join(pair)}--tree {args.out}")
    if args.keep:
        print(f"wrote {Path(args.draft) / FILE}")


def write_tree(file: Path, paths: list[tuple[int, ...]], comment: str) -> None:
    """Write a file that `--tree` takes, and conf/tree too."""
    lines = [f"# {comment}", "_target_: specdec.trees.StaticTree", "paths:"]
    lines += [f"  - {list(path)}" for path in sorted(paths, key=lambda path: (len(path), path))]
    write_text(file, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
