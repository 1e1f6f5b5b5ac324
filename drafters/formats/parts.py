"""What layouts share of a draft layer: the fields of its config, and the map from tensors to our modules.

Fused parameters of ours hold the rows of several tensors.
"""

from typing import Any

from torch import Tensor

from specdec.drafters.layers import DraftShape
from specdec.drafters.mtp import MoE
from specdec.drafters.vocab import DraftVocab
from specdec.model.archs.base import read_rope
from specdec.model.checkpoint import StrictFill, whole
from specdec.model.config_fields import DIAGNOSED, check_config, head_shape
from specdec.model.loader import attention_parameters, mlp_parameters
from specdec.model.rope import Rope

BLOCK = 8  # how many tokens PARD's authors train, and the default of speculators


def layer_parameters(layer: Any, prefix: str) -> dict[str, Tensor]:
    """The tensors of a draft layer (`attention`, `post_norm`, `mlp`) by their Hugging Face names."""
    out = attention_parameters(layer.attention, f"{prefix}.self_attn")
    out |= whole(layer.post_norm, f"{prefix}.post_attention_layernorm")
    return out | (moe_parameters if isinstance(layer.mlp, MoE) else mlp_parameters)(layer.mlp, f"{prefix}.mlp")


def moe_parameters(moe: MoE, prefix: str) -> dict[str, Tensor]:
    """The tensors of a mixture of experts. Published checkpoints store every expert by itself."""
    out = whole(moe.router, f"{prefix}.gate")
    if moe.router_bias is not None:
        out[f"{prefix}.gate.e_score_correction_bias"] = moe.router_bias
    for i in range(moe.experts.count):
        gate, up = moe.gate_up[i].chunk(2)
        parts = {"gate": gate, "up": up, "down": moe.down[i]}
        out |= {f"{prefix}.experts.{i}.{name}_proj.weight": part for name, part in parts.items()}
    if moe.shared is not None:
        out |= mlp_parameters(moe.shared, f"{prefix}.shared_expert" + ("" if moe.shared_gate is not None else "s"))
    if moe.shared_gate is not None:
        out |= whole(moe.shared_gate, f"{prefix}.shared_expert_gate")
    return out


def fill(
    parameters: dict[str, Tensor], tensors: dict[str, Tensor], name: str, layout: str, optional: tuple[str, ...] = ()
) -> None:
    """Copy every tensor to its place, and each place once. The caller reads those named in `optional` itself.

    Raises ValueError, with the checkpoint's `name`, for a tensor that is missing, left over or of another shape.
    """
    strict = StrictFill(name, parameters)
    for key, value in tensors.items():
        if key not in optional and not strict.put(key, value):
            raise ValueError(f"{name}: the checkpoint holds the tensor {key}, for which {layout} has no place")
    strict.finish()


def held(parameters: dict[str, Tensor], vocab: DraftVocab) -> dict[str, Tensor]:
    """The tensors of a head, and `draft_ids`, the tokens that it proposes, unless it proposes all."""
    return parameters | ({} if vocab.ids is None else {"draft_ids": vocab.ids})


def describe_ids(tensors: dict[str, Tensor], vocab: int) -> str:
    """Which tokens a head of `draft_ids` proposes, in words."""
    ids = tensors.get("draft_ids")
    return f"all {vocab} target tokens" if ids is None else f"{len(ids)} of {vocab} tokens"


def read_shape(config: dict, name: str) -> DraftShape:
    """The shape that a Hugging Face config of the Llama kind states. Raises ValueError if we cannot run it.

    `num_hidden_layers` and `architectures` are not read, because published heads of one layer claim up to 40 layers,
    and to be whole models.
    """
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{name}: activation {config['hidden_act']!r} is not supported; supported is 'silu'")
    check_config(config, f"{name}: config.json", any_range=DIAGNOSED)
    try:
        return DraftShape(
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            **head_shape(config),
            eps=config.get("rms_norm_eps", 1e-6),
            rope=read_rope(config),
            context=config.get("max_position_embeddings", 2048),
        )
    except KeyError as error:
        raise ValueError(f"{name}: config.json lacks the field {error}") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: a field of config.json has a value that cannot be: {error}") from None


def number(config: dict, name: str, where: str) -> int:
    """Return a whole number of a config. Raises ValueError if it states none."""
    if not isinstance(config.get(name), int):
        raise ValueError(f"{where}: config.json lacks the number {name}")
    return config[name]


def renamed(tensors: dict[str, Tensor], old: str, new: str) -> dict[str, Tensor]:
    """Return the tensors with the prefix `old` replaced by `new`."""
    return {new + name.removeprefix(old) if name.startswith(old) else name: t for name, t in tensors.items()}


def block_doubts(config: dict) -> list[str]:
    """Return a warning if the config does not state how many tokens the drafter was trained to draft."""
    stated = "block_size" in config
    return [] if stated else [f"how many tokens it has learnt to draft is not stated: {BLOCK} are taken"]


def dtype_name(tensor: Tensor) -> str:
    """Return the name of a tensor's dtype as configs spell it, for example 'bfloat16'."""
    return str(tensor.dtype).removeprefix("torch.")


def describe_shape(shape: DraftShape) -> dict[str, str]:
    """The shape of a draft layer, in words."""
    grouped = f", {shape.kv_heads} for keys and values" if shape.kv_heads != shape.heads else ""
    return {
        "layer": f"hidden {shape.hidden}, MLP {shape.intermediate}, {shape.heads} heads of {shape.head_dim}{grouped}",
        "rope": describe_rope(shape.rope),
        "context": f"{shape.context} positions",
        "rms_norm_eps": f"{shape.eps:g}",
    }


def describe_rope(rope: Rope) -> str:
    """Return the base and the scaling of a rope in words."""
    scaling = "" if rope.scaling == "default" else f", {rope.scaling} scaling by {rope.factor:g}"
    return f"theta {rope.theta:g}{scaling}"


def shape_faults(shape: DraftShape) -> list[str]:
    """The numbers of a shape with which nothing can be computed."""
    out = [shape.rope.fault()]
    if not 0 <= shape.eps < 1:
        out.append(f"rms_norm_eps is {shape.eps:g}, and must be from 0 to 1")
    if shape.context < 1:
        out.append(f"max_position_embeddings is {shape.context}, and must be at least 1")
    return [fault for fault in out if fault]
