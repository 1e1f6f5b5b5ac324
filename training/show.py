"""Show conversations as the target reads them, with the tokens that a drafter learns coloured.

    specdec data show --target T --data conversations.jsonl

Without colours, as in a file, training tokens are between ⟦ and ⟧.
"""

import argparse
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from specdec.api import DEMO_TARGET
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
    screen.print(Text(f"{sample.mask.sum()} of {len(sample.ids)} are training tokens", "dim"))


def run(args: argparse.Namespace) -> None:
    """Print conversations for the parsed flags of `specdec data show`."""
    target: Any = load_texts(args.target or DEMO_TARGET)
    tally = Tally(args.bad)
    samples = read_samples(
        read_records(**preset(args.data) | ({"split": args.split} if args.split else {}), streaming=True),
        target,
        max_length=min(args.max_length, target.config.context),
        too_long="cut",
        tally=tally,
    )
    shown = list(itertools.islice(samples, args.skip, args.skip + args.limit))
    tally.report()
    if not shown:
        left = f" beyond the first {args.skip}" if args.skip else "; prompts get answers by specdec data regenerate"
        raise ValueError(f"the data hold no conversation in which the assistant speaks{left}")
    for sample in shown:
        show(target.tokenizer, sample, console())
