"""MTP heads inside the target's own checkpoint, which other loaders of the target skip.

Their tensors are named in three ways: `model.mtp_layers.{i}.*` (MiMo); `model.layers.{N}.*` with N the number of layers
(GLM-4.5, DeepSeek-V3), with copies of the target's embedding and head, which are not read; and `mtp.*` (Qwen3-Next),
whose norms are stored minus one. The block may be dense or a mixture of experts. DeepSeek's own attention (MLA) is
refused.
"""

import re
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from specdec.drafters.formats.base import (
    Family,
    Layout,
    Meaning,
    Reading,
    Sizes,
    TargetFacts,
    Tensors,
    check_faults,
    check_target,
)
from specdec.drafters.formats.mtp import NAMES, WORDS, head_parameters
from specdec.drafters.formats.parts import describe_shape, fill, read_shape, shape_faults
from specdec.drafters.layers import DraftShape
from specdec.drafters.mtp import Experts, MoE, Mtp, MtpForward
from specdec.drafters.vocab import DraftVocab
from specdec.model.checkpoint import check_shapes

MIMO, QWEN = "model.mtp_layers.", "mtp."
EMBEDDING = "model.embed_tokens.weight"
KINDS = {"mimo": "as MiMo", "deepseek": "as DeepSeek-V3 and GLM-4.5", "qwen": "as Qwen3-Next"}
# the parts of a head except its decoder layer: ours -> theirs, within the head's prefix
PARTS = {
    "mimo": NAMES,
    "deepseek": {"embed_norm": "enorm", "hidden_norm": "hnorm", "project": "eh_proj", "norm": "shared_head.norm"},
    "qwen": {
        "embed_norm": "pre_fc_norm_embedding",
        "hidden_norm": "pre_fc_norm_hidden",
        "project": "fc",
        "norm": "norm",
    },
}


@dataclass(frozen=True)
class InsideMeaning(Meaning):
    """What the heads inside a target are."""

    config: dict  # the target's
    kind: str  # how their tensors are named: a key of `PARTS`
    feedback: str = "post"  # what they feed back (`MtpForward`), which no config states


def naming(name: str, layers: int) -> str | None:
    """The key of `PARTS` by which a tensor is named; None for a tensor that belongs to no MTP head."""
    if name.startswith(MIMO):
        return "mimo"
    if name.startswith(QWEN):
        return "qwen"
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return "deepseek" if match and int(match[1]) >= layers else None


COPIES = ("embed_tokens.weight", "shared_head.head.weight")  # of the target's embedding and head


def _empty(meaning: InsideMeaning, tensors: Tensors, name: str, tap: int, embedding: Tensor, head: Tensor) -> Mtp:
    """The heads without their weights, on the device that torch is set to."""
    config, kind = meaning.config, meaning.kind
    if any(".kv_a_proj_with_mqa" in key or ".kv_b_proj" in key for key in tensors):
        raise ValueError(f"{name}: its MTP layer has multi-head latent attention (MLA), which is not supported")
    shape = _shape(config, name)
    _, layer = _prefixes(tensors, kind, name)
    share = (config.get("rope_parameters") or {}).get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    queries = f"{layer}.self_attn.q_proj.weight"
    if queries not in tensors:
        raise ValueError(f"{name}: the checkpoint lacks the tensor {queries}")
    how = MtpForward(
        hidden_first=kind == "mimo",
        feedback=meaning.feedback,
        qkv_bias=f"{layer}.self_attn.q_proj.bias" in tensors,
        qk_norm=f"{layer}.self_attn.q_norm.weight" in tensors,
        gate=tensors[queries].shape[0] == 2 * shape.heads * shape.head_dim,
        rotary_dim=None if share == 1.0 else int(shape.head_dim * share),
    )
    experts = _experts(config, tensors, layer)
    if experts is None:
        check_shapes(name, tensors, {f"{layer}.mlp.up_proj.weight": (shape.intermediate, shape.hidden)})
    mlp = (lambda: MoE(shape.hidden, experts)) if experts else None
    return Mtp(shape, tap, DraftVocab(config["vocab_size"]), embedding, head, forward=how, mlp=mlp)


def _shape(config: dict, name: str) -> DraftShape:
    """The shape without the part of a head that is rotated, which `_empty` reads."""
    bare = {k: v for k, v in config.items() if k != "partial_rotary_factor"}
    rope = {k: v for k, v in (config.get("rope_parameters") or {}).items() if k != "partial_rotary_factor"}
    return read_shape(bare | ({"rope_parameters": rope} if rope else {}), name)


def _prefixes(tensors: Tensors, kind: str, name: str) -> tuple[str, str]:
    """The prefixes of the only head's tensors, and of its decoder layer's; ValueError if there are several heads."""
    if kind == "qwen":
        return "mtp", "mtp.layers.0"
    prefixes = {".".join(key.split(".")[:3]) for key in tensors}
    if len(prefixes) > 1:
        raise ValueError(
            f"{name}: it has {len(prefixes)} MTP layers, each trained on the output of the one before, which is not "
            "supported; supported is one"
        )
    (prefix,) = prefixes
    return prefix, prefix


def _experts(config: dict, tensors: Tensors, layer: str) -> Experts | None:
    """The experts of the config; None for a dense layer."""
    if f"{layer}.mlp.gate.weight" not in tensors:
        return None
    names = ("shared_experts", "shared_expert")
    shared = next((name for name in names if f"{layer}.mlp.{name}.up_proj.weight" in tensors), None)
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


def _parameters(drafter: Mtp, kind: str, tensors: Tensors, name: str) -> Tensors:
    """Published tensor names -> the parameters of the only head."""
    return head_parameters(drafter.blocks[0], *_prefixes(tensors, kind, name), PARTS[kind])


class InsideFamily(Family):
    """Define the family of multi-token prediction (MTP) heads that are part of a target's checkpoint."""

    objective = "mtp"
    title = "MTP heads inside a target"
    reads = 0

    def construct(self, meaning: InsideMeaning, tensors: Tensors, target, name: str) -> Mtp:
        """Build the drafter from the MTP tensors of the target's checkpoint.

        Raises ValueError unless the tensors fit a block of grouped-query attention and a dense or mixture-of-experts
        MLP.
        """
        check_faults(shape_faults(_shape(meaning.config, name)), name)
        check_target(self.sizes(meaning), (target.config.hidden, target.vocab), name)
        drafter = _empty(meaning, tensors, name, target.config.layers, target.embed.weight, target.head.weight)
        copies = tuple(key for key in tensors if key.endswith(COPIES))
        parameters = _parameters(drafter, meaning.kind, tensors, name)
        if meaning.kind == "qwen":
            tensors = {k: v + 1 if v.ndim == 1 else v for k, v in tensors.items()}  # only norms are vectors there
        fill(parameters, tensors, name, "its MTP head", optional=copies)
        return drafter

    @override
    def sizes(self, meaning: InsideMeaning) -> Sizes:
        return meaning.config["hidden_size"], meaning.config["vocab_size"]

    def expected(self, meaning: InsideMeaning, tensors: Tensors) -> dict[str, torch.Size]:
        """Raises ValueError as `construct` does."""
        nothing = torch.empty(0, meaning.config["hidden_size"], device="meta")
        with torch.device("meta"):
            drafter = _empty(meaning, tensors, meaning.config.get("model_type", "the target"), 0, nothing, nothing)
        parameters = _parameters(drafter, meaning.kind, tensors, "")
        copies = {key: tensor.shape for key, tensor in tensors.items() if key.endswith(COPIES)}
        return {key: rows.shape for key, rows in parameters.items()} | copies

    @override
    def faults(self, meaning: InsideMeaning, tensors: Tensors) -> list[str]:
        return shape_faults(_shape(meaning.config, ""))

    @override
    def describe(self, meaning: InsideMeaning, tensors: Tensors) -> dict[str, str]:
        first = meaning.kind == "mimo"
        return describe_shape(_shape(meaning.config, "")) | {
            "names": KINDS[meaning.kind],
            "taps": "hidden_states[N], the last one, after the final norm",
            "projection input": "[norm(hidden), norm(embedding)]" if first else "[norm(embedding), norm(hidden)]",
            "norms": "stored minus one" if meaning.kind == "qwen" else "as they are",
            "feedback": f"the hidden state {WORDS[meaning.feedback]}",
            "head": "the target's, after the head's own final norm",
            "embedding": "the target's",
        }

    @override
    def readings(self, meaning: InsideMeaning, tensors: Tensors, target) -> list[Reading]:
        other = "pre" if meaning.feedback == "post" else "post"
        project = f".{PARTS[meaning.kind]['project']}.weight"
        swapped = {k: torch.cat(v.chunk(2, 1)[::-1], 1) for k, v in tensors.items() if ("." + k).endswith(project)}
        words = "[embedding, hidden]" if meaning.kind == "mimo" else "[hidden, embedding]"
        return [
            Reading(f"feedback {WORDS[other]}", replace(meaning, feedback=other), tensors),
            Reading(f"projection input {words}", meaning, tensors | swapped),
        ]


def wants(config: dict, name: str) -> bool:
    """Return whether the tensor `name` belongs to an MTP head."""
    return naming(name, config.get("num_hidden_layers", 0)) is not None


def read(config: dict, tensors: Tensors, name: str) -> tuple[InsideMeaning, Tensors]:
    """Return the target's config, the kind of names that the MTP tensors have, and the tensors."""
    return InsideMeaning(config, naming(next(iter(tensors)), config["num_hidden_layers"]) or ""), tensors


def write(meaning: InsideMeaning, tensors: Tensors, target: TargetFacts | None) -> tuple[dict, Tensors]:
    """Raise ValueError, because these heads are not written apart from their target."""
    raise ValueError("MTP heads inside a target's checkpoint stay there: there is nothing to convert")


LAYOUT = Layout(
    "inside",
    "inside the target's checkpoint",
    lambda config, tensors: EMBEDDING in tensors and any(wants(config, name) for name in tensors),
    read,
    write,
    wants=wants,
)
FAMILY = InsideFamily()
