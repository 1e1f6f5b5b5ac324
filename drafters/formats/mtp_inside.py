"""MTP heads inside the target's own checkpoint, which other loaders of the target skip: more layouts of `mtp.FAMILY`.

Their tensors are named in three ways: `model.mtp_layers.{i}.*` (MiMo); `model.layers.{N}.*` with N the number of layers
(GLM-4.5, DeepSeek-V3), with copies of the target's embedding and head, which are not read; and `mtp.*` (Qwen3-Next),
whose norms are stored less 1. The block may be dense or a mixture of experts. DeepSeek's own attention (MLA) is
refused. No config states what is fed back: it is taken to be the state after the final norm.
"""

import re
from functools import partial
from math import inf
from typing import Any

from specdec.drafters.formats.base import Layout, TargetFacts, Tensors
from specdec.drafters.formats.mtp import NAMES, PREFIX, MtpMeaning
from specdec.drafters.formats.parts import read_shape
from specdec.drafters.layers import DraftShape
from specdec.drafters.mtp import Experts, MtpForward

HEAD = f"{PREFIX}.0"  # the only one
EMBEDDING = "model.embed_tokens.weight"
COPIES = ("embed_tokens.weight", "shared_head.head.weight")  # of the target's embedding and head
# How tensors are named: by whom, how the tensors of a head begin, and the parts that have other names than MiMo's.
KINDS: dict[str, tuple[str, str, dict[str, str]]] = {
    "mimo": ("MiMo", r"model\.mtp_layers\.\d+\.", {}),
    "deepseek": (
        "DeepSeek-V3 and GLM-4.5",
        r"model\.layers\.\d+\.",
        {"embed_norm": "enorm", "hidden_norm": "hnorm", "project": "eh_proj", "norm": "shared_head.norm"},
    ),
    "qwen": (
        "Qwen3-Next",
        r"mtp\.(layers\.0\.)?",
        {"embed_norm": "pre_fc_norm_embedding", "hidden_norm": "pre_fc_norm_hidden", "project": "fc", "norm": "norm"},
    ),
}


def wants(kind: str, config: dict, name: str) -> bool:
    """Return whether the tensor `name` belongs to an MTP head that is named in this way."""
    if (begin := re.match(KINDS[kind][1], name)) is None or name.endswith(COPIES):
        return False
    return kind != "deepseek" or int(begin[0].split(".")[2]) >= config.get("num_hidden_layers", inf)


def recognise(kind: str, config: dict, tensors: Tensors) -> bool:
    """Return whether a target's checkpoint holds heads that are named in this way."""
    return EMBEDDING in tensors and any(wants(kind, config, name) for name in tensors)


def read(kind: str, config: dict, tensors: Tensors, name: str) -> tuple[MtpMeaning, Tensors]:
    """What the only head means, and its tensors under MiMo's names. ValueError for several heads, and for MLA."""
    _, begin, parts = KINDS[kind]
    if kind != "qwen" and len(heads := {".".join(key.split(".")[:3]) for key in tensors}) > 1:
        raise ValueError(
            f"{name}: it has {len(heads)} MTP layers, each trained on the output of the one before, which is not "
            "supported; supported is one"
        )
    if any(".kv_a_proj_with_mqa" in key or ".kv_b_proj" in key for key in tensors):
        raise ValueError(f"{name}: its MTP layer has multi-head latent attention (MLA), which is not supported")
    ours = {f"{theirs}.weight": f"{NAMES[part]}.weight" for part, theirs in parts.items()}
    bare = {re.sub(f"^{begin}", "", key): tensor for key, tensor in tensors.items()}
    tensors = {f"{HEAD}.{ours.get(key, key)}": tensor for key, tensor in bare.items()}
    shape, queries = _shape(config, name), tensors.get(f"{HEAD}.self_attn.q_proj.weight")
    share = (config.get("rope_parameters") or {}).get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    how = MtpForward(
        hidden_first=kind == "mimo",
        qkv_bias=f"{HEAD}.self_attn.q_proj.bias" in tensors,
        qk_norm=f"{HEAD}.self_attn.q_norm.weight" in tensors,
        gate=queries is not None and len(queries) == 2 * shape.heads * shape.head_dim,
        rotary_dim=None if share == 1.0 else int(shape.head_dim * share),
        offset_norms=kind == "qwen",
        experts=_experts(config, tensors),
    )
    return MtpMeaning(shape, config["vocab_size"], 1, how), tensors


def write(meaning: MtpMeaning, tensors: Tensors, target: TargetFacts | None) -> tuple[dict, Tensors]:
    """Raise ValueError: a target's checkpoint is not written."""
    raise ValueError("heads are not written into a target's checkpoint; a folder of their own has the layout mimo")


def _shape(config: dict, name: str) -> DraftShape:
    """The shape without the part of a head that is rotated, which `read` reads."""
    bare = {k: v for k, v in config.items() if k != "partial_rotary_factor"}
    rope = {k: v for k, v in (config.get("rope_parameters") or {}).items() if k != "partial_rotary_factor"}
    return read_shape(bare | ({"rope_parameters": rope} if rope else {}), name)


def _experts(config: dict, tensors: Tensors) -> Experts | None:
    """The experts of the config; None for a dense layer."""
    if f"{HEAD}.mlp.gate.weight" not in tensors:
        return None
    names = ("shared_experts", "shared_expert")
    shared = next((name for name in names if f"{HEAD}.mlp.{name}.up_proj.weight" in tensors), None)
    routed: dict[str, Any] = {}
    if f"{HEAD}.mlp.gate.e_score_correction_bias" in tensors:
        routed = {"score": "sigmoid", "scale": config.get("routed_scaling_factor", 1.0)}
        routed |= {"groups": config.get("n_group") or 1, "kept_groups": config.get("topk_group") or 1}
    return Experts(
        count=tensors[f"{HEAD}.mlp.gate.weight"].shape[0],
        chosen=config["num_experts_per_tok"],
        width=tensors[f"{HEAD}.mlp.experts.0.up_proj.weight"].shape[0],
        normalise=config.get("norm_topk_prob", True),
        shared=tensors[f"{HEAD}.mlp.{shared}.up_proj.weight"].shape[0] if shared else 0,
        shared_gate=f"{HEAD}.mlp.shared_expert_gate.weight" in tensors,
        **routed,
    )


LAYOUTS = tuple(
    Layout(
        f"inside-{kind}",
        f"inside the target's checkpoint, named as by {whose}",
        partial(recognise, kind),
        partial(read, kind),
        write,
        wants=partial(wants, kind),
    )
    for kind, (whose, _, _) in KINDS.items()
)
