"""A transformers model with layers on several devices, in memory or on disk, by accelerate (`device_map`).

accelerate's hooks bring a layer's inputs to its device, and offloaded weights for the time of the layer's forward.
Embedding and head are always held on one device, the main one, where our cache is: drafters read their weights.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from torch import Tensor, nn

from specdec.cli.reading import parse_json, read_text
from specdec.schema import shown

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WORDS = ("auto", "balanced", "balanced_low_0", "sequential")  # that accelerate knows


def read_map(device_map: str) -> str | dict[str, str | int]:
    """Return a word of accelerate's, or the content of a JSON file: module names with their devices.

    The device 'cpu' is memory and 'disk' is the checkpoint's files. Raises ValueError for anything else.
    """
    if device_map in WORDS:
        return device_map
    if not device_map.endswith(".json"):
        raise ValueError(f"device_map must be {', '.join(WORDS)} or a .json file, got {shown(device_map)}")
    found = parse_json(read_text(Path(device_map), "device map"), device_map)
    if not isinstance(found, dict) or not all(isinstance(place, str | int) for place in found.values()):
        raise ValueError(f"{device_map} must map the names of modules to devices, as {json.dumps({'model.norm': 0})}")
    return found


def weight_of(module: Any) -> Tensor:
    """Return the weight of a module; an offloaded weight comes from accelerate's store."""
    if module.weight.device.type != "meta":
        return module.weight
    return module._hf_hook.weights_map["weight"]


def hold_ends(model: "PreTrainedModel") -> None:
    """Move embedding and head to the device on which the embedding is computed."""
    ends: tuple[Any, Any] = model.get_input_embeddings(), model.get_output_embeddings()
    hook = getattr(ends[0], "_hf_hook", None)
    main = torch.device(getattr(hook, "execution_device", None) or ends[0].weight.device)
    for module in ends:
        weight = weight_of(module)
        if module.weight.device != main:
            remove_hook_from_module(module)
            module.weight = nn.Parameter(weight.detach().to(main), requires_grad=False)
            add_hook_to_module(module, AlignDevicesHook(execution_device=main))
