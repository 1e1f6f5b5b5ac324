"""Count tokens and write the most frequent ones as an FR-Spec token map (arXiv 2502.14856).

    specdec data count --data answers.jsonl --size 4096 --out map.json
    specdec data count --target TARGET --text corpus.txt --size 32768 --out freq_32768.pt

Of --data, conversations in ShareGPT or OpenAI form, the answers count; the target's own, from `training.regenerate`,
are best. Of --text, plain text files of any size, everything counts. Tokens that end a text are always in the map. The
map is a list of token ids, the most frequent first: .json, or .pt as FR-Spec and SGLang read it.
"""

import argparse
import itertools
import json
from functools import partial
from pathlib import Path

import torch

from specdec.api import DEMO_TARGET
from specdec.cli.files import write_text, write_whole
from specdec.cli.reading import open_text, pieces_of
from specdec.model.loader import load_texts
from specdec.training.data import Tally, count_tokens, read_records, read_samples
from specdec.training.loop.checkpoint import save_state


def counts_of(target, data: list[Path], text: list[Path]) -> torch.Tensor:
    """[V]: how often each token occurs in an answer of `data` or anywhere in `text`. target: as of `load_texts`."""
    records, tally = itertools.chain.from_iterable(map(read_records, data)), Tally()
    samples = read_samples(records, target, max_length=target.config.context, too_long="cut", tally=tally)
    counts = count_tokens(samples, target.vocab)
    tally.report()
    for path in text:
        with open_text(path, "text") as file:
            for piece in pieces_of(file):
                ids = target.tokenizer(piece, add_special_tokens=False)["input_ids"]
                counts += torch.bincount(torch.tensor(ids, dtype=torch.int64), minlength=target.vocab)
    return counts


def most_frequent(counts: torch.Tensor, size: int, always: frozenset[int]) -> list[int]:
    """`size` token ids, those of `always` among them, the most frequent first."""
    ranked = counts.sort(descending=True, stable=True).indices.tolist()
    room = size - len(always)
    chosen = set(itertools.islice((i for i in ranked if i not in always), room)) | always
    return [i for i in ranked if i in chosen]


def write(ids: list[int], path: Path) -> None:
    """Write a token map, as .pt or else as JSON."""
    if path.suffix == ".pt":
        write_whole(path, partial(save_state, ids))
    else:
        write_text(path, json.dumps(ids) + "\n")


def run(args: argparse.Namespace) -> None:
    """Count tokens and write the map for the parsed flags of `specdec data count`."""
    target = load_texts(args.target or DEMO_TARGET)
    if not len(target.eos) < args.size <= target.vocab:
        raise ValueError(f"--size must lie between {len(target.eos) + 1} and {target.vocab}, got {args.size}")
    counts = counts_of(target, args.data, args.text)
    ids = most_frequent(counts, args.size, target.eos)
    write(ids, args.out)
    share = counts[ids].sum().item() / counts.sum().clamp(min=1).item()
    report = {"out": str(args.out), "tokens": int(counts.sum()), "size": len(ids), "coverage": round(share, 5)}
    print(json.dumps(report))
