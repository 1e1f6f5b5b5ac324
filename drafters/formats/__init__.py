"""Published layouts of draft checkpoints: recognised by their tensors, never by what their config claims."""

import os
from pathlib import Path

from drafters.common import RecurrentDrafter
from drafters.formats import eagle3
from specdec.checkpoint import read_json, read_tensors, resolve
from specdec.model import fast_layout


def load_drafter(path: str | os.PathLike, target) -> RecurrentDrafter:
    """A drafter for `target` from a checkpoint folder or hub name, in the target's dtype and on its device.

    Raises ValueError, one sentence, for a checkpoint that is not a drafter, is damaged, or does not fit the target.
    """
    folder = resolve(path)
    config = read_json(folder / "config.json")
    tensors = dict(read_tensors(folder))
    if not ("fc.weight" in tensors and any(name.startswith("midlayer.") for name in tensors)):
        raise ValueError(f"{path} is not an EAGLE-3 drafter: it has no fc.weight with midlayer.* tensors")
    drafter = eagle3.build(config, tensors, target, str(path)).to(target.embed.weight).eval()
    fast_layout(drafter)
    return drafter


def save_drafter(drafter: RecurrentDrafter, folder: str | os.PathLike, target=None) -> None:
    """Write a drafter in the layout of its kind, as one folder, whole or not at all."""
    eagle3.save(drafter, Path(folder), target)
