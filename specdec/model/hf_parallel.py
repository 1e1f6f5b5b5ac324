"""Divide a transformers model among the processes of a launcher.

Tensor parallelism is transformers' own (`tp_plan`): a process holds some heads of each attention, and some of the
hidden dimensions of each feed-forward, and its products are summed over all processes. Every process holds the whole
embedding and the whole head, because a drafter reads them. So every process has all hidden states and all logits.
"""

import re

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig

from specdec import ranks

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
    plan = model.tp_plan or {}
    if not plan:
        raise ValueError(f"model family {config.model_type!r} has no plan for tensor parallelism in transformers")
    why = misfit(config, plan, count)
    if why:
        raise ValueError(why)
    ends = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    whole = {name: "replicate" for name, module in model.named_modules() if id(module) in ends}
    return DistributedConfig(tp_size=count, tp_plan=whole)


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

    Args:
        model: The model; a sketch suffices.
        size: Bytes per parameter.
    """
    plan = model.tp_plan or {}
    ends = {id(module) for module in (model.get_input_embeddings(), model.get_output_embeddings())}
    cut = whole = 0
    seen: set[int] = set()
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:  # a tied head
                continue
            seen.add(id(parameter))
            generic = re.sub(r"\.\d+(?=\.|$)", ".*", name)
            style = plan.get(f"{generic}.{key}") or plan.get(generic) or ""
            divided = style.startswith(CUTS) and id(module) not in ends
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
