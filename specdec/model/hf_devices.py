"""A transformers model on several devices: layers divided among processes, or placed as a whole.

Tensor parallelism is transformers' own (`tp_plan`): a process of a launcher holds some heads of each attention, and
some of the hidden dimensions of each feed-forward, and its products are summed over all processes. So every process
has all hidden states and all logits.

Layers on several devices, in memory or on disk, are accelerate's (`device_map`). Its hooks bring a layer's inputs to
its device, and offloaded weights for the time of the layer's forward.

Drafters read the embedding and the head. Either way both are whole: in every process, or on the main device, where our
cache is.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig

from specdec import ranks
from specdec.cli.reading import parse_json, read_text
from specdec.schema import shown

WORDS = ("auto", "balanced", "balanced_low_0", "sequential")  # that accelerate knows
CUTS = ("colwise", "rowwise", "packed", "embedding")  # how names of transformers' styles begin that cut a weight


def share(config: PretrainedConfig, device: torch.device) -> DistributedConfig:
    """Return how transformers divides this model among the processes that were started.

    Raises ValueError, without the model's name, if there is one process, or if the model cannot be divided so.
    """
    count = ranks.world()
    if count == 1:
        raise ValueError(
            "tp_plan shares a target among processes, and there is one: start several with torchrun --nproc-per-node N"
        )
    if torch.cuda.is_available() and device.type == "cpu":
        raise ValueError("tp_plan takes the GPUs of a machine that has some: give the device cuda")
    model = sketch(config)
    plan, ends = model.tp_plan or {}, _ends(model)
    if not plan:
        raise ValueError(f"model family {config.model_type!r} has no plan for tensor parallelism in transformers")
    if why := misfit(config, plan, count):
        raise ValueError(why)
    whole = {name: "replicate" for name, module in model.named_modules() if module in ends}
    return DistributedConfig(tp_size=count, tp_plan=whole)


def _ends(model: PreTrainedModel) -> tuple[Any, Any]:
    return model.get_input_embeddings(), model.get_output_embeddings()


def sketch(config: PretrainedConfig) -> PreTrainedModel:
    """Return the model without contents, on the meta device."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def misfit(config: PretrainedConfig, plan: dict[str, str], count: int) -> str | None:
    """Return why a model cannot be divided into `count` shares, or None if it can.

    Projections of keys that the plan does not divide need no divisible heads.
    """
    if not any(name.endswith(("k_proj", "qkv_proj", "query_key_value")) for name in plan):
        return None
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if heads % count or kv_heads % count:
        return f"{heads} heads with {kv_heads} of keys cannot be shared by {count} processes: take a divisor of both"
    return None


def shares(model: PreTrainedModel, size: int) -> tuple[int, int]:
    """Return the bytes of parameters that tensor parallelism divides, and of those that each process holds whole.

    model: a sketch suffices. size: bytes per parameter.
    """
    plan = model.tp_plan or {}
    ends, cut, whole = _ends(model), 0, 0
    for name, parameter in model.named_parameters():  # a tied head is not there twice
        place, _, key = name.rpartition(".")
        generic = re.sub(r"\.\d+(?=\.|$)", ".*", place)
        style = plan.get(f"{generic}.{key}") or plan.get(generic) or ""
        divided = style.startswith(CUTS) and model.get_submodule(place) not in ends
        divided &= not (style.startswith("rowwise") and key == "bias")
        cut, whole = cut + divided * parameter.numel(), whole + (not divided) * parameter.numel()
    return cut * size, whole * size


def keep_shares(model: nn.Module) -> None:
    """Release the whole tensors that a process's shares were cut from: on a CPU transformers holds views of them."""
    for module in model.modules():
        for name, whole in module.named_parameters(recurse=False):
            if isinstance(whole, DTensor) and whole.to_local().untyped_storage().nbytes() > whole.to_local().nbytes:
                share = whole.to_local().clone()
                mesh, shape, stride = whole.device_mesh, whole.shape, whole.stride()
                cut = DTensor.from_local(share, mesh, whole.placements, run_check=False, shape=shape, stride=stride)
                setattr(module, name, nn.Parameter(cut, requires_grad=False))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the share of a tensor that this process holds; all of it if it is not divided."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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


def hold_ends(model: PreTrainedModel) -> None:
    """Move embedding and head to the device on which the embedding is computed."""
    ends = _ends(model)
    hook = getattr(ends[0], "_hf_hook", None)
    main = torch.device(getattr(hook, "execution_device", None) or ends[0].weight.device)
    for module in ends:
        weight = weight_of(module)
        if module.weight.device != main:
            remove_hook_from_module(module)
            module.weight = nn.Parameter(weight.detach().to(main), requires_grad=False)
            add_hook_to_module(module, AlignDevicesHook(execution_device=main))
