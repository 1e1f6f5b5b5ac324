"""Heads made from the bundled ones for `check_in_sglang.py`, one for each thing that an export for SGLang can say.

They are those of `vllm_variants.py` and some more. They read taps 2, 5 and 7, since SGLang has no name for the last
hidden state, which the bundled EAGLE-3 head reads. None is taught anew, so they draft worse than what they are made
from. What SGLang makes of them must be the same all the same.
"""

from collections.abc import Iterator
from pathlib import Path

import checkout  # noqa: F401
import torch
import vllm_variants
from vllm_variants import TAPS, changed, saved, without_norms

from specdec.api import DEMO_TARGET
from specdec.drafters.formats import Checkpoint, open_checkpoint
from specdec.drafters.formats.token_map import read_token_map

TOKENS = DEMO_TARGET.parent / "frspec_4096.json"


def eagle3_variants(head: Checkpoint, target) -> Iterator[tuple[str, Checkpoint]]:
    yield from vllm_variants.eagle3_variants(head, target)
    head = changed(head, taps=TAPS)
    plain = changed(without_norms(head, target), feedback="pre")
    yield "as EAGLE-3 was published", plain
    yield "a part of the vocabulary", of_a_part(head, target)
    yield "as it was published, a part of the vocabulary", of_a_part(plain, target)


def of_a_part(head: Checkpoint, target) -> Checkpoint:
    """A head that proposes half of the target's tokens, with the target's rows as its own."""
    ids = read_token_map(TOKENS, target.config.vocab).ids.sort().values
    rows = {"lm_head.weight": target.head.weight.cpu()[ids].bfloat16(), "d2t": ids - torch.arange(len(ids))}
    member = torch.zeros(target.config.vocab, dtype=torch.bool)
    return changed(head, add=rows | {"t2d": member.index_fill(0, ids, True)}, own_head=True, draft_vocab=len(ids))


def eagle2_variants(head: Checkpoint, target) -> Iterator[tuple[str, Checkpoint]]:
    yield from vllm_variants.eagle2_variants(head, target)
    yield "a part of the vocabulary", changed(head, add={"draft_ids": read_token_map(TOKENS, target.config.vocab).ids})


def make(folder: Path, target) -> Iterator[tuple[str, Path]]:
    """Name of the case, and folder of the head in our own layout."""
    for bundled, variants in (("eagle3", eagle3_variants), ("eagle2", eagle2_variants)):
        for name, head in variants(open_checkpoint(DEMO_TARGET.parent / bundled), target):
            yield f"{bundled}: {name}", saved(head, folder, f"{bundled} {name}")
