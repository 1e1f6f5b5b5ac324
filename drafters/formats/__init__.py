"""Published layouts of draft checkpoints: recognised by their tensors, never by what their config claims."""

import os
from pathlib import Path

from torch import nn

from drafters import draft_model, ngram
from drafters.eagle import Eagle
from drafters.eagle3 import Eagle3
from drafters.formats import eagle, eagle3, medusa, mtp
from drafters.medusa import Medusa
from drafters.mtp import Mtp
from specdec.checkpoint import read_json, read_tensors, resolve
from specdec.model import fast_layout
from specdec.types import Drafter

LAYOUTS = {Eagle3: eagle3, Eagle: eagle, Mtp: mtp, Medusa: medusa}


def load_drafter(path: str | os.PathLike, target) -> Drafter:
    """A drafter for `target` from a checkpoint folder or hub name, in the target's dtype and on its device.

    `ngram`, `ngram:lookup` and `ngram:suffix` name drafters that need no checkpoint.
    Raises ValueError, one sentence, for a checkpoint that is not a drafter, is damaged, or does not fit the target.
    """
    drafter = ngram.from_name(str(path), target)
    if drafter is not None:
        return drafter
    folder = resolve(path)
    config = read_json(folder / "config.json")
    tensors = dict(read_tensors(folder))
    if draft_model.is_language_model(config, tensors):
        return draft_model.create(target, path=path)
    drafter = _recognise(set(tensors), str(path)).build(config, tensors, target, str(path))
    drafter = drafter.to(target.embed.weight).eval()
    fast_layout(drafter)
    return drafter


def _recognise(names: set[str], path: str):
    if "fc.weight" in names and any(name.startswith("midlayer.") for name in names):
        return eagle3
    if "fc.weight" in names and "lm_head.weight" not in names:
        return eagle
    if any(name.startswith(mtp.PREFIX) for name in names):
        return mtp
    if "0.0.linear.weight" in names:
        return medusa
    raise ValueError(
        f"{path} is not a drafter of a known layout: it has none of midlayer.* with fc (EAGLE-3), layers.0.* with fc "
        "(EAGLE-1/2), model.mtp_layers.* (MTP), 0.0.linear (Medusa)"
    )


def save_drafter(drafter: nn.Module, folder: str | os.PathLike, target=None) -> None:
    """Write a drafter in the layout of its kind, as one folder, whole or not at all."""
    LAYOUTS[type(drafter)].save(drafter, Path(folder), target)
