"""EAGLE-1/2: what its checkpoints mean, the layout of its authors, and that of speculators.

The published layout has `layers.0.*` without an input norm, and `fc` over [embedding, feature]. The first versions of
speculators write `fusion_fc.*` for `fc.*`, `transformer.*` for `layers.0.*`, and a nested config; version 0.9 no longer
has this kind.

Traps: `fc` has a bias unless the config says `"bias": false`; in speculators it has none unless `fusion_bias` is true.
There is no norm before the target's head. The file may hold a copy of the target's embedding, which is not read. A
config without `rope_theta` means 10000. The tensor `draft_ids` is ours, for heads trained on a part of the vocabulary:
it names the target token of each row. The field `own_embedding` is ours: the embedding in the file counts, and not the
target's.
"""

from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor
from typing_extensions import override

from specdec.drafters.eagle import Eagle
from specdec.drafters.formats.base import EMBEDDING, Family, Layout, Meaning, Reading, TargetFacts, Tensors, write_only
from specdec.drafters.formats.parts import (
    describe_ids,
    describe_shape,
    dtype_name,
    held,
    layer_parameters,
    number,
    read_shape,
    renamed,
)
from specdec.drafters.formats.speculators import kind_of, nested_config, speculators_fields
from specdec.drafters.layers import DraftShape, shape_fields
from specdec.drafters.vocab import DraftVocab
from specdec.model.checkpoint import whole

TOKEN_MAP = "token_map.pt"  # SGLang gets its path by a flag


@dataclass(frozen=True)
class EagleMeaning(Meaning):
    """What the head of a checkpoint is."""

    shape: DraftShape
    vocab: int  # the target's tokens
    fc_bias: bool
    qkv_bias: bool
    taps: tuple[int, ...] | None = None  # None: the last hidden state
    own_embedding: bool = False


class EagleFamily(Family):
    """Define the family of EAGLE-1 (arXiv 2401.15077) and EAGLE-2 (arXiv 2406.16858) heads, which share one forward."""

    objective = "eagle"
    title = noun = "EAGLE-1/2"
    drafter = Eagle
    saved_as = "eagle"
    sign = "layers.0.* with fc"
    servers = MappingProxyType({"vllm": "vllm", "sglang": "sglang"})
    method, algorithm = "eagle", "EAGLE"
    optional = (EMBEDDING, "draft_ids")

    @override
    def make(self, meaning: EagleMeaning, taps: tuple[int, ...], vocab: DraftVocab, embedding: Tensor, head: Tensor):
        drafter = Eagle(meaning.shape, taps[0], vocab, embedding, head, meaning.fc_bias, meaning.qkv_bias)
        drafter.own_embedding = meaning.own_embedding
        return drafter

    @override
    def parameters(self, drafter: Eagle) -> Tensors:
        return whole(drafter.fc, "fc") | layer_parameters(drafter, "layers.0")

    @override
    def expected(self, meaning: EagleMeaning, tensors: Tensors) -> dict[str, torch.Size]:
        own = {EMBEDDING: torch.Size([meaning.vocab, meaning.shape.hidden])} if meaning.own_embedding else {}
        return super().expected(meaning, tensors) | own

    def dismantle(self, drafter: Eagle, target) -> tuple[EagleMeaning, Tensors]:
        """Without an embedding unless it is the head's own."""
        biases, own = (drafter.fc.bias is not None, drafter.attention.qkv.bias is not None), drafter.own_embedding
        meaning = EagleMeaning(drafter.shape, drafter.vocab.target_size, *biases, own_embedding=own)
        tensors = held(self.parameters(drafter), drafter.vocab)
        return meaning, tensors | ({EMBEDDING: drafter.embedding} if own else {})

    @override
    def describe(self, meaning: EagleMeaning, tensors: Tensors) -> dict[str, str]:
        biases = [name for name, there in (("fc", meaning.fc_bias), ("q, k, v", meaning.qkv_bias)) if there]
        other = ", not the file's" if EMBEDDING in tensors else ""
        return describe_shape(meaning.shape) | {
            "taps": "hidden_states[N], the last one, after the final norm",
            "fc input": "[embedding, hidden], the embedding first; no norms",
            "layer input": "fc's output as it is: the layer has no input norm",
            "feedback": "the layer's output as it is",
            "head": "the target's, without a norm before it",
            "biases": ", ".join(biases) or "none",
            "vocabulary": describe_ids(tensors, meaning.vocab),
            "embedding": "its own" if meaning.own_embedding else f"the target's{other}",
        }

    @override
    def readings(self, meaning: EagleMeaning, tensors: Tensors, target) -> list[Reading]:
        swapped = tensors | {"fc.weight": torch.cat(tensors["fc.weight"].chunk(2, dim=1)[::-1], dim=1)}
        other = Reading("fc input [hidden, embedding]", meaning, swapped)
        return [*self.rope_readings(meaning, tensors, target), other]

    @override
    def refuse(self, server: str, meaning: EagleMeaning) -> None:
        if server == "sglang" and meaning.own_embedding:
            raise ValueError(
                "SGLang would draft wrongly with this head: it takes the target's embedding for the head's own"
            )


# The published layout


def recognise(config: dict, tensors: Tensors) -> bool:
    """EAGLE-1/2's `fc` takes two hidden states. EAGLE-3's takes three, and EAGLE-3 has a head."""
    if not {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= set(tensors) or "lm_head.weight" in tensors:
        return False
    rows, width = tensors["fc.weight"].shape
    return width == 2 * rows


def read(config: dict, tensors: Tensors, name: str) -> tuple[EagleMeaning, Tensors]:
    """Read a checkpoint of the EAGLE authors, whose `fc` has a bias unless the config states otherwise."""
    return _meaning(config, bool(config.get("bias", True)), tensors, name), tensors


def _meaning(config: dict, fc_bias: bool, tensors: Tensors, name: str) -> EagleMeaning:
    vocab, own = number(config, "vocab_size", name), bool(config.get("own_embedding", False))
    if own and EMBEDDING not in tensors:
        raise ValueError(f"{name}: the config sets own_embedding, but the file lacks {EMBEDDING}")
    qkv_bias = "layers.0.self_attn.q_proj.bias" in tensors
    return EagleMeaning(read_shape(config, name), vocab, fc_bias, qkv_bias, own_embedding=own)


def write(meaning: EagleMeaning, tensors: Tensors, target: TargetFacts | None) -> tuple[dict, Tensors]:
    """Write the layout of the EAGLE authors, with the field `own_embedding` for a head that has its own embedding."""
    config = {
        "architectures": ["LlamaForCausalLMEagle"],
        **shape_fields(meaning.shape),
        "vocab_size": meaning.vocab,
        "bias": meaning.fc_bias,
        "dtype": dtype_name(tensors["fc.weight"]),
    }
    return config | ({"own_embedding": True} if meaning.own_embedding else {}), tensors


def write_sglang(meaning: EagleMeaning, tensors: Tensors, target: TargetFacts | None) -> tuple[dict, Tensors]:
    """Write the layout that SGLang reads, in which `fc` always has a bias.

    Without one in the file, SGLang's bias stays random. The fields `bias` and `attention_bias` of a config add biases
    to q, k, v and the attention output in SGLang.
    """
    tensors = {"fc.bias": torch.zeros(meaning.shape.hidden, dtype=tensors["fc.weight"].dtype)} | tensors
    config, tensors = write(meaning, tensors, target)
    del config["bias"]
    if meaning.qkv_bias:
        config["attention_bias"] = True
    return config, tensors


# speculators


def read_speculators(config: dict, tensors: Tensors, name: str) -> tuple[EagleMeaning, Tensors]:
    """Read an EAGLE-1/2 head of the speculators library. Raise ValueError for the variant with three more norms."""
    if config.get("layernorms"):
        raise ValueError(f"{name}: layernorms is set, a variant of EAGLE with three more norms, which is not supported")
    layer = nested_config(config, name)
    tensors = renamed(renamed(tensors, "fusion_fc.", "fc."), "transformer.", "layers.0.")
    return _meaning(layer, bool(config.get("fusion_bias", False)), tensors, name), tensors


def write_speculators(meaning: EagleMeaning, tensors: Tensors, target: TargetFacts | None) -> tuple[dict, Tensors]:
    """Write the layout of the speculators library. Raise ValueError for a draft vocabulary or an own embedding."""
    if "draft_ids" in tensors:
        raise ValueError("the speculators layout of EAGLE-1/2 has no place for a draft vocabulary")
    if meaning.own_embedding:
        raise ValueError("the speculators layout of EAGLE-1/2 cannot say that the head's embedding is its own")
    config = speculators_fields("eagle", "EagleSpeculator", target)
    config["architectures"].append("LlamaDecoderLayer")
    config |= {
        "transformer_layer_architecture": "LlamaDecoderLayer",
        "layernorms": False,
        "fusion_bias": meaning.fc_bias,
        "dtype": dtype_name(tensors["fc.weight"]),
        "transformer_layer_config": shape_fields(meaning.shape)
        | {"vocab_size": meaning.vocab, "attention_bias": meaning.qkv_bias},
    }
    return config, renamed(renamed(tensors, "fc.", "fusion_fc."), "layers.0.", "transformer.")


SPECULATORS = Layout(
    "speculators",
    "EAGLE-1/2 as of the first versions of speculators",
    lambda config, tensors: kind_of(config) == "eagle" and "fusion_fc.weight" in tensors,
    read_speculators,
    write_speculators,
)
PUBLISHED = Layout("eagle", "EAGLE-1/2 as of EAGLE", recognise, read, write)
SGLANG = write_only(
    "sglang",
    "EAGLE-1/2 as SGLang reads it",
    write_sglang,
    pickles=lambda tensors: {TOKEN_MAP: tensors["draft_ids"].tolist() if "draft_ids" in tensors else None},
)
FAMILY = EagleFamily()
