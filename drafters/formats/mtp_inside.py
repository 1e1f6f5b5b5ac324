"""MTP heads inside the target's own checkpoint, which other loaders of the target skip.

Three ways to name them: `model.mtp_layers.{i}.*` (MiMo), `model.layers.{N}.*` with N the number of layers (GLM-4.5,
DeepSeek-V3; also copies of the embedding and of the head, which are the target's and not read), and `mtp.*`
(Qwen3-Next; its norms are stored minus one). The block may be dense or a mixture of experts; DeepSeek's own attention
(MLA) is refused.
"""

import re
from dataclasses import replace

from torch import Tensor

from drafters.common import DraftShape
from drafters.formats.fields import check_fit, fill, layer_parameters, read_shape
from drafters.moe import Experts, MoE
from drafters.mtp import Mtp, MtpForward, MtpLayer
from drafters.vocab import DraftVocab
from specdec.checkpoint import whole

MIMO, QWEN = "model.mtp_layers.", "mtp."
# the parts of a head beside its decoder layer: ours -> theirs, within the head's prefix
PARTS = {
    "mimo": {
        "embed_norm": "token_layernorm",
        "hidden_norm": "hidden_layernorm",
        "project": "input_proj",
        "norm": "final_layernorm",
    },
    "deepseek": {"embed_norm": "enorm", "hidden_norm": "hnorm", "project": "eh_proj", "norm": "shared_head.norm"},
    "qwen": {
        "embed_norm": "pre_fc_norm_embedding",
        "hidden_norm": "pre_fc_norm_hidden",
        "project": "fc",
        "norm": "norm",
    },
}


def naming(name: str, layers: int) -> str | None:
    """Which of the three ways a tensor of a target's checkpoint belongs to, if it belongs to an MTP head at all."""
    if name.startswith(MIMO):
        return "mimo"
    if name.startswith(QWEN):
        return "qwen"
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return "deepseek" if match and int(match[1]) >= layers else None


def build(config: dict, tensors: dict[str, Tensor], target, name: str, feedback: str = "post") -> Mtp:
    """The MTP heads of a target's checkpoint. tensors: those that `naming` knows. feedback: see `MtpForward`.

    Raises ValueError for a block that is not ordinary grouped-query attention with a dense or mixture-of-experts MLP.
    """
    layers = target.config.layers
    kind = naming(next(iter(tensors)), layers)
    if any(".kv_a_proj_with_mqa" in key or ".kv_b_proj" in key for key in tensors):
        raise ValueError(f"{name}: its MTP layer has multi-head latent attention (MLA), which is not supported")
    bare = {k: v for k, v in config.items() if k != "partial_rotary_factor"}
    rope = {k: v for k, v in (config.get("rope_parameters") or {}).items() if k != "partial_rotary_factor"}
    shape = read_shape(bare | ({"rope_parameters": rope} if rope else {}), name)
    check_fit(config, shape, target, name)
    prefixes = _prefixes(tensors, kind, layers)
    first = _layer_prefix(prefixes[0], kind)
    how = MtpForward(
        hidden_first=kind == "mimo",
        feedback=feedback,
        qkv_bias=f"{first}.self_attn.q_proj.bias" in tensors,
        qk_norm=f"{first}.self_attn.q_norm.weight" in tensors,
        gate=tensors[f"{first}.self_attn.q_proj.weight"].shape[0] == 2 * shape.heads * shape.head_dim,
        rotary_dim=_rotary_dim(config, shape),
    )
    experts = _experts(config, tensors, first)
    mlp = (lambda: MoE(shape.hidden, experts)) if experts else None
    vocab = DraftVocab(target.config.vocab)
    drafter = Mtp(
        shape, layers, vocab, target.embed.weight, target.head.weight, heads=len(prefixes), forward=how, mlp=mlp
    )
    wanted = {}
    for prefix, block in zip(prefixes, drafter.blocks, strict=True):
        wanted |= _parameters(block, prefix, kind)
    if kind == "qwen":
        tensors = {k: v + 1 if v.ndim == 1 else v for k, v in tensors.items()}  # only norms are vectors there
    copies = [k for k in tensors if k.endswith(("embed_tokens.weight", "shared_head.head.weight"))]
    fill(wanted, tensors, name, "its MTP head", aside=tuple(copies))
    return drafter


def _prefixes(tensors: dict[str, Tensor], kind: str, layers: int) -> list[str]:
    if kind == "qwen":
        return ["mtp"]
    stem, place = ("model.mtp_layers", 2) if kind == "mimo" else ("model.layers", 2)
    return [f"{stem}.{i}" for i in sorted({int(key.split(".")[place]) for key in tensors})]


def _layer_prefix(prefix: str, kind: str) -> str:
    return f"{prefix}.layers.0" if kind == "qwen" else prefix


def _rotary_dim(config: dict, shape: DraftShape) -> int | None:
    share = (config.get("rope_parameters") or {}).get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    return None if share == 1.0 else int(shape.head_dim * share)


def _experts(config: dict, tensors: dict[str, Tensor], layer: str) -> Experts | None:
    """What the config says of the experts, if the layer has any."""
    if f"{layer}.mlp.gate.weight" not in tensors:
        return None
    shared = next(
        (k for k in ("shared_experts", "shared_expert") if f"{layer}.mlp.{k}.up_proj.weight" in tensors), None
    )
    how = Experts(
        count=tensors[f"{layer}.mlp.gate.weight"].shape[0],
        chosen=config["num_experts_per_tok"],
        width=tensors[f"{layer}.mlp.experts.0.up_proj.weight"].shape[0],
        normalise=config.get("norm_topk_prob", True),
        shared=tensors[f"{layer}.mlp.{shared}.up_proj.weight"].shape[0] if shared else 0,
        shared_gate=f"{layer}.mlp.shared_expert_gate.weight" in tensors,
    )
    if f"{layer}.mlp.gate.e_score_correction_bias" not in tensors:
        return how
    return replace(
        how,
        score="sigmoid",
        scale=config.get("routed_scaling_factor", 1.0),
        groups=config.get("n_group") or 1,
        kept_groups=config.get("topk_group") or 1,
    )


def _parameters(block: MtpLayer, prefix: str, kind: str) -> dict[str, tuple[Tensor, int, int]]:
    layer = _layer_prefix(prefix, kind)
    out = whole(block.input_norm, f"{layer}.input_layernorm") | layer_parameters(block, layer)
    for ours, theirs in PARTS[kind].items():
        out |= whole(getattr(block, ours), f"{prefix}.{theirs}")
    return out
