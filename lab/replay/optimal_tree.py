"""Measure how often a drafter's children are right, by depth and rank, and write the best static tree for it.

    specdec tree --prompt-file questions.jsonl --out tree.yaml
    specdec generate --prompt-file others.jsonl --tree tree.yaml

The target answers the prompts plainly, and the drafter drafts along these answers. Test the tree on other prompts.
"""

import argparse
from pathlib import Path

from lab.models import add_model_flags, add_prompt_flags, load_models
from specdec.api import Sampling, generate
from specdec.cli.errors import one_sentence_errors
from specdec.cli.files import write_text
from specdec.cli.flags import command_parser
from specdec.text import read_prompts
from trees.optimal import expected_tau, measure_acceptance, optimal_paths


def parser() -> argparse.ArgumentParser:
    p = command_parser("tree", __doc__, "--prompt-file FILE --out FILE [options]")
    add_model_flags(p.add_argument_group("models"))
    add_prompt_flags(p.add_argument_group("answers"), limit=20, max_new_tokens=128)
    tree = p.add_argument_group("tree")
    tree.add_argument("--num-draft-tokens", type=int, default=16, help="nodes, the root counted (default 16)")
    tree.add_argument("--steps", type=int, default=8, help="no node is deeper, nor than the drafter goes (default 8)")
    tree.add_argument("--topk", type=int, default=8, help="no node has more children (default 8)")
    tree.add_argument("--out", type=Path, required=True, help="a YAML file for `specdec generate --tree`")
    return p


@one_sentence_errors
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    target, drafter = load_models(args)
    if args.topk > drafter.vocab.size:
        raise ValueError(f"topk is {args.topk}, but the draft vocabulary has {drafter.vocab.size} tokens only")
    steps = min(args.steps, drafter.max_steps or args.steps)
    prompts = read_prompts(args.prompt_file)[: args.limit]
    answers = generate(
        target,
        prompts,
        sampling=Sampling(args.temperature),
        max_new_tokens=args.max_new_tokens,
        seed=args.seed,
        raw=args.raw,
    ).rows
    accept = measure_acceptance(
        target, drafter, [row.prompt for row in answers], [row.tokens for row in answers], steps, args.topk
    ).tolist()
    paths = optimal_paths(accept, args.num_draft_tokens)
    for depth, row in enumerate(accept, 1):
        print(f"depth {depth}: " + "  ".join(f"{share:6.1%}" for share in row))
    print(
        f"{args.num_draft_tokens} nodes, {max(map(len, paths))} levels; expected tau {expected_tau(paths, accept):.3f}"
    )
    write_tree(args.out, paths, f"Of {len(prompts)} prompts of {args.prompt_file.name}: see lab/replay/optimal_tree.py")


def write_tree(file: Path, paths: list[tuple[int, ...]], comment: str) -> None:
    """Write a file that `--tree` takes, and conf/tree too."""
    lines = [f"# {comment}", "_target_: trees.StaticTree", "paths:"]
    lines += [f"  - {list(path)}" for path in sorted(paths, key=lambda path: (len(path), path))]
    write_text(file, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
