"""The drafter of a checkpoint as training goes on with it: from=CHECKPOINT, which is conf/drafter/saved.yaml."""

import os

import torch
from torch import nn

from specdec.contracts import Drafter
from specdec.drafters.formats import damaged, open_checkpoint, recognise
from specdec.drafters.formats.base import Family
from specdec.drafters.layers import SharedHead
from specdec.drafters.vocab import DraftVocab
from specdec.model.archs import text_config
from specdec.model.checkpoint import read_headers
from specdec.model.names import resolve
from specdec.model.weight_files import read_json


def family_at(path: str | os.PathLike) -> Family:
    """Return the family of a checkpoint without reading its weights. Raises ValueError if it is no drafter's."""
    folder = resolve(path)
    with damaged(path):
        return recognise(text_config(read_json(folder / "config.json")), read_headers(folder), str(path))[0]


def create(target, *, path: str | None = None, vocab: DraftVocab | None = None) -> Drafter:
    """Return the drafter of a checkpoint in fp32, to be trained: shape, draft vocabulary and taps are the checkpoint's.

    A head whose rows are the target's was not trained, and is not trained now. vocab: not used, as the checkpoint has
    its own. Raises ValueError for a checkpoint that is no drafter, is damaged, or does not fit the target.
    """
    if path is None:
        raise ValueError("drafter=saved needs a checkpoint: give from=CHECKPOINT instead")
    checkpoint = open_checkpoint(path)
    checkpoint.refuse_nonfinite()
    drafter = checkpoint.construct(target).float()
    ids, heads = drafter.vocab.ids, drafter.heads_in_use()
    rows = target.head.weight if ids is None else target.head.weight[ids.to(target.device)]
    if heads and all(
        isinstance(h, nn.Linear) and h.bias is None and torch.equal(h.weight, rows.float()) for h in heads
    ):
        drafter.set_heads([SharedHead(target.head.weight, ids) for _ in heads])
    return drafter
