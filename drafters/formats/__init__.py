"""Published layouts of draft checkpoints: recognised by their tensors, never by what their config claims."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from drafters import draft_model, ngram
from drafters.eagle import Eagle
from drafters.eagle3 import Eagle3
from drafters.formats import eagle, eagle3, medusa, modelopt, mtp, mtp_inside, recipe, speculators
from drafters.formats.base import Layout, Tensors
from drafters.formats.token_map import read_token_map
from drafters.layers import restrict
from drafters.medusa import Medusa
from drafters.mtp import Mtp
from specdec.contracts import Drafter
from specdec.model.checkpoint import read_headers, read_json, read_tensors, resolve

# A family's layouts in the order in which they are recognised: of two that fit, the more special comes first.
FAMILIES: dict[ModuleType, tuple[Layout, ...]] = {
    recipe: recipe.LAYOUTS,
    eagle3: (eagle3.OWN, eagle3.PUBLISHED, speculators.EAGLE3, modelopt.TRAINING, modelopt.EXPORTED),
    eagle: eagle.LAYOUTS,
    mtp_inside: mtp_inside.LAYOUTS,
    mtp: mtp.LAYOUTS,
    medusa: medusa.LAYOUTS,
}
FAMILY_OF = {Eagle3: eagle3, Eagle: eagle, Mtp: mtp, Medusa: medusa}
MAPS = ("d2t", "t2d", "draft_ids")  # small, and needed to say what is in force


@dataclass(frozen=True)
class Checkpoint:
    """A draft checkpoint whose spelling has been read away (`base`). With headers only, its weights are on the meta
    device, but for the maps d2t and t2d."""

    path: str
    family: ModuleType
    layout: Layout
    meaning: Any
    tensors: Tensors

    def conventions(self) -> dict[str, str]:
        """Everything that is in force, in words."""
        return {"family": self.family.TITLE, "layout": self.layout.title} | self.family.describe(
            self.meaning, self.tensors
        )


def open_checkpoint(path: str | os.PathLike, headers: bool = False) -> Checkpoint:
    """Recognise and read a checkpoint folder or hub name, without a target."""
    folder = resolve(path)
    config = read_json(folder / "config.json")
    held = read_headers(folder)
    family, layout = recognise(config, held, str(path))
    tensors = {name: tensor for name, tensor in held.items() if layout.wants(config, name)}
    read = {name for name in tensors if not headers or name.endswith(MAPS)}
    tensors |= dict(read_tensors(folder, only=read))
    meaning, tensors = layout.read(config, tensors, str(path))
    return Checkpoint(str(path), family, layout, meaning, tensors)


def recognise(config: dict, tensors: Tensors, name: str) -> tuple[ModuleType, Layout]:
    """The family and the layout of a checkpoint."""
    for family, layouts in FAMILIES.items():
        for layout in layouts:
            if layout.recognise(config, tensors):
                return family, layout
    raise ValueError(
        f"{name} is not a drafter of a known layout: it has none of midlayer.* with fc (EAGLE-3), layers.0.* with fc "
        "(EAGLE-1/2), model.mtp_layers.* (MTP), 0.0.linear (Medusa)"
    )


def load_drafter(
    path: str | os.PathLike,
    target,
    *,
    token_map: str | os.PathLike | None = None,
    feedback: str | None = None,
    dtype: torch.dtype | None = None,
) -> Drafter:
    """A drafter for `target` from a checkpoint folder or hub name, on the target's device, in `dtype` or in the
    target's: a narrower one costs no exactness, only some acceptance. Frozen: `requires_grad_(True)` lets it learn.

    `ngram`, `ngram:lookup` and `ngram:suffix` name drafters that need no checkpoint, and a whole language model drafts
    by itself. All others say in `conventions`, in words, how their checkpoint was read. token_map: a file that
    `read_token_map` reads; the drafter then proposes these tokens only (FR-Spec). feedback: 'pre' or 'post', of MTP
    heads inside the target's own checkpoint, for which no config says what they feed back. Raises ValueError, one
    sentence, for a checkpoint that is not a drafter, is damaged, or does not fit the target.
    """
    drafter = ngram.from_name(str(path), target) or _language_model(path, target)
    if drafter is not None:
        if token_map is not None or feedback is not None or dtype is not None:
            raise ValueError(f"{path}: token_map, feedback and dtype are for drafters that learn")
        return drafter
    checkpoint = open_checkpoint(path)
    if feedback is not None:
        if checkpoint.family is not mtp_inside:
            raise ValueError(f"{path}: its own config says what it feeds back; feedback is for MTP heads in a target")
        checkpoint = replace(checkpoint, meaning=replace(checkpoint.meaning, feedback=feedback))
    drafter = checkpoint.family.construct(checkpoint.meaning, checkpoint.tensors, target, str(path))
    drafter.conventions = checkpoint.conventions()
    if token_map is not None:
        restrict(drafter, read_token_map(Path(token_map), target.vocab).ids)
        drafter.conventions["token map"] = f"{token_map}, which leaves {drafter.vocab.size} tokens to propose"
    drafter.to(device=target.device, dtype=dtype or target.dtype).eval().requires_grad_(False)
    return drafter


def _language_model(path: str | os.PathLike, target) -> Drafter | None:
    folder = resolve(path)
    config, held = read_json(folder / "config.json"), read_headers(folder)
    if mtp_inside.recognise(config, held):  # then it is loaded for its heads
        return None
    return draft_model.create(target, path=path) if draft_model.is_language_model(config, held) else None


def save_drafter(drafter: nn.Module, folder: str | os.PathLike, target=None) -> None:
    """Write a drafter in the layout of its kind, as one folder, whole or not at all."""
    FAMILY_OF.get(type(drafter), recipe).save(drafter, Path(folder), target)
