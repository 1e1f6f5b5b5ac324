"""Show conversations as the target reads them, with the tokens that a drafter learns coloured.

    specdec show --target T --data conversations.jsonl

Without colours, as in a file, training tokens are between ⟦ and ⟧.
"""

import argparse
import itertools
from collections.abc import Iterator

import numpy as np
from rich.console import Console
from rich.text import Text

from specdec.api import DEMO_TARGET
from specdec.cli.errors import one_sentence_errors
from specdec.cli.flags import command_parser
from specdec.cli.terminal import console
from specdec.model.loader import load_texts
from specdec.training.data import Sample, Tally, preset, read_records, read_samples

LEARNT = "black on bright_green"


def runs(tokenizer, sample: Sample) -> Iterator[tuple[str, bool]]:
    """Yields the text in pieces, and whether each piece is of training tokens."""
    edges = np.flatnonzero(np.diff(sample.mask)) + 1
    for ids, mask in zip(np.split(sample.ids, edges), np.split(sample.mask, edges), strict=True):
        yield tokenizer.decode(ids), bool(mask[0])


def show(tokenizer, sample: Sample, screen: Console) -> None:
    """Print one conversation, and its number of training tokens."""
    text = Text()
    for piece, learnt in runs(tokenizer, sample):
        if screen.color_system:
            text.append(piece, LEARNT if learnt else None)
        else:
            text.append(f"⟦{piece}⟧" if learnt else piece)
    screen.print(text, soft_wrap=True)
    screen.print(Text(f"{sample.mask.sum()} of {len(sample.ids)} tokens are learnt", "dim"))


def parser() -> argparse.ArgumentParser:
    p = command_parser("show", __doc__, "--data DATA [options]")
    p.add_argument("--target", default=DEMO_TARGET, help="whose tokenizer and template (default: the bundled demo)")
    p.add_argument(
        "--data",
        required=True,
        metavar="DATA",
        help="a file, a data set of the hub, or the name of a preset in conf/data",
    )
    p.add_argument("--split", help="of a data set")
    p.add_argument("--bad", choices=("error", "skip"), default="error", help="what a record that cannot be used does")
    p.add_argument("--skip", type=int, default=0, help="begin after this many conversations")
    p.add_argument("--count", type=int, default=1, help="show this many")
    p.add_argument("--max-length", type=int, default=2048, help="tokens; longer conversations are cut")
    return p


@one_sentence_errors
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    if args.skip < 0 or args.count < 1:
        raise ValueError(f"--skip must be at least 0 and --count at least 1, got {args.skip} and {args.count}")
    target = load_texts(args.target)
    tally = Tally(args.bad)
    samples = read_samples(
        read_records(**preset(args.data) | ({"split": args.split} if args.split else {}), streaming=True),
        target,
        max_length=min(args.max_length, target.config.context),
        too_long="cut",
        tally=tally,
    )
    shown = list(itertools.islice(samples, args.skip, args.skip + args.count))
    tally.report()
    if not shown:
        left = f" beyond the first {args.skip}" if args.skip else "; prompts get answers by specdec regenerate"
        raise ValueError(f"the data hold no conversation in which the assistant speaks{left}")
    for sample in shown:
        show(target.tokenizer, sample, console())


if __name__ == "__main__":
    main()
