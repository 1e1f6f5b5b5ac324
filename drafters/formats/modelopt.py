"""EAGLE-3 as NVIDIA's ModelOpt keeps it while training, and as it exports it.

While it trains, everything is under `eagle_module.`, among other weights or alone. The norms of the two inputs are
next to the layer (`input_embeds_norm`, `hidden_norm`) or inside it, by version. The head is `eagle_lm_head`.
Exported, the prefix is gone, the layer is layers.0.*, and there is no t2d. Older versions export the layout of EAGLE-3
itself, which `eagle3_layout` reads.

Traps: layer ids count outputs, as in SpecForge. A file without a head means the target's, one without d2t the whole
vocabulary. q, k and v have biases if the config says so, which the tensors show.
"""

import dataclasses
from typing import Any

from specdec.drafters.formats import eagle3_layout
from specdec.drafters.formats.base import Layout, TargetFacts, Tensors
from specdec.drafters.formats.eagle3 import Eagle3Meaning
from specdec.drafters.formats.speculators import kind_of, renamed

PREFIX = "eagle_module."
TRAINING_NAMES = {
    "input_embeds_norm.weight": "midlayer.input_layernorm.weight",
    "hidden_norm.weight": "midlayer.hidden_norm.weight",
    "eagle_lm_head.weight": "lm_head.weight",
}


def read_training(config: dict, tensors: Tensors, name: str) -> tuple[Eagle3Meaning, Tensors]:
    """Read an EAGLE-3 head from a ModelOpt training checkpoint, ignoring the tensors of the target."""
    ours = {key.removeprefix(PREFIX): value for key, value in tensors.items() if key.startswith(PREFIX)}
    meaning, ours = read(config, {TRAINING_NAMES.get(key, key): value for key, value in ours.items()}, name)
    return meaning, ours


def read(config: dict, tensors: Tensors, name: str) -> tuple[Eagle3Meaning, Tensors]:
    """Read an EAGLE-3 head that ModelOpt exported. A file without `lm_head.weight` uses the target's head."""
    meaning, tensors = eagle3_layout.read(config, renamed(tensors, "layers.0.", "midlayer."), name)
    if "lm_head.weight" in tensors:
        return meaning, tensors
    return dataclasses.replace(meaning, own_head=False), tensors


def write_training(meaning: Eagle3Meaning, tensors: Tensors, target: TargetFacts | None) -> tuple[dict, Tensors]:
    """Write an EAGLE-3 head under the names of a ModelOpt training checkpoint."""
    config, tensors = write(meaning, tensors, target)
    back = {new.replace("midlayer.", "layers.0."): old for old, new in TRAINING_NAMES.items()}
    return config, {PREFIX + back.get(key, key): value for key, value in tensors.items()}


def write(meaning: Eagle3Meaning, tensors: Tensors, target: TargetFacts | None) -> tuple[dict, Tensors]:
    """Write an EAGLE-3 head as ModelOpt exports it, without the mask `t2d`."""
    config, tensors = eagle3_layout.write(dataclasses.replace(meaning, own_head=True), tensors, target)
    return config, renamed({key: t for key, t in tensors.items() if key != "t2d"}, "midlayer.", "layers.0.")


SHARED: dict[str, Any] = {"shares_head": True, "names_layers": True, "doubts": eagle3_layout.doubts}
EXPORTED = Layout(
    "modelopt",
    "EAGLE-3 as ModelOpt exports it",
    lambda config, tensors: "layers.0.hidden_norm.weight" in tensors and kind_of(config) is None,
    read,
    write,
    **SHARED,
)
TRAINING = Layout(
    "modelopt-training",
    "EAGLE-3 as ModelOpt trains it",
    lambda config, tensors: any(name.startswith(PREFIX) for name in tensors),
    read_training,
    write_training,
    **SHARED,
)
