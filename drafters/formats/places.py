"""Where the tensors of a checkpoint lie in our modules, whose fused parameters hold the rows of several tensors."""

import torch
from torch import Tensor, nn

from specdec.drafters.moe import MoE
from specdec.drafters.vocab import DraftVocab
from specdec.model.checkpoint import StrictFill, fused, whole
from specdec.model.layers import GatedMLP

Place = tuple[Tensor, int, int]  # a parameter, its first row, and how many


def layer_parameters(layer: nn.Module, prefix: str) -> dict[str, Place]:
    """The tensors of a draft layer (`attention`, `post_norm`, `mlp`) by their Hugging Face names."""
    attention = layer.attention
    q = attention.heads * attention.head_dim * (2 if attention.gate else 1)
    kv = attention.kv_heads * attention.head_dim
    out = (
        fused(attention.qkv, [f"{prefix}.self_attn.{x}_proj" for x in "qkv"], [q, kv, kv])
        | whole(attention.o, f"{prefix}.self_attn.o_proj")
        | whole(layer.post_norm, f"{prefix}.post_attention_layernorm")
        | (moe_parameters if isinstance(layer.mlp, MoE) else mlp_parameters)(layer.mlp, f"{prefix}.mlp")
    )
    if attention.q_norm is not None:
        out |= whole(attention.q_norm, f"{prefix}.self_attn.q_norm")
        out |= whole(attention.k_norm, f"{prefix}.self_attn.k_norm")
    return out


def mlp_parameters(mlp: GatedMLP, prefix: str) -> dict[str, Place]:
    """The tensors of a gated MLP."""
    width = mlp.down.in_features
    return fused(mlp.gate_up, [f"{prefix}.gate_proj", f"{prefix}.up_proj"], [width] * 2) | whole(
        mlp.down, f"{prefix}.down_proj"
    )


def moe_parameters(moe: MoE, prefix: str) -> dict[str, Place]:
    """The tensors of a mixture of experts. Published checkpoints store every expert by itself."""
    how, hidden = moe.experts, moe.down.shape[1]
    out = whole(moe.router, f"{prefix}.gate")
    if moe.router_bias is not None:
        out[f"{prefix}.gate.e_score_correction_bias"] = (moe.router_bias, 0, how.count)
    for i in range(how.count):
        out[f"{prefix}.experts.{i}.gate_proj.weight"] = (moe.gate_up[i], 0, how.width)
        out[f"{prefix}.experts.{i}.up_proj.weight"] = (moe.gate_up[i], how.width, how.width)
        out[f"{prefix}.experts.{i}.down_proj.weight"] = (moe.down[i], 0, hidden)
    if moe.shared is not None:
        out |= mlp_parameters(moe.shared, f"{prefix}.shared_expert" + ("" if moe.shared_gate is not None else "s"))
    if moe.shared_gate is not None:
        out |= whole(moe.shared_gate, f"{prefix}.shared_expert_gate")
    return out


def fill(
    parameters: dict[str, Place], tensors: dict[str, Tensor], name: str, layout: str, aside: tuple[str, ...] = ()
) -> None:
    """Copy every tensor to its place, and each place once. The caller reads those named in `aside` itself.

    Raises ValueError, with the checkpoint's `name`, for a tensor that is missing, left over or of another shape."""
    strict = StrictFill(name, parameters)
    for key, value in tensors.items():
        if key not in aside and not strict.put(key, value):
            raise ValueError(f"{name}: the checkpoint holds the tensor {key}, for which {layout} has no place")
    strict.finish()


def rows_of(parameters: dict[str, Place]) -> dict[str, Tensor]:
    """The tensors to write, by name: the reverse of `fill`."""
    return {name: tensor[start : start + rows] for name, (tensor, start, rows) in parameters.items()}


def held(parameters: dict[str, Place], vocab: DraftVocab) -> dict[str, Tensor]:
    """The tensors of a head, and `draft_ids`, the tokens that it proposes, unless it proposes all."""
    return rows_of(parameters) | ({} if vocab.ids is None else {"draft_ids": vocab.ids})


def read_ids(tensors: dict[str, Tensor], key: str = "draft_ids") -> Tensor | None:
    """The tokens [U] that a head proposes; None for all."""
    ids = tensors.get(key)
    return None if ids is None else ids.to(torch.int64)


def describe_ids(tensors: dict[str, Tensor], vocab: int) -> str:
    """Which tokens a head of `draft_ids` proposes, in words."""
    ids = read_ids(tensors)
    return f"all {vocab} target tokens" if ids is None else f"{len(ids)} of {vocab} tokens"
