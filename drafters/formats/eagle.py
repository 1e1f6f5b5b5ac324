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

import torch
from torch import Tensor

from specdec.drafters.eagle import Eagle
from specdec.drafters.formats.base import (
    Family,
    Layout,
    Meaning,
    Reading,
    TargetFacts,
    Tensors,
    check_faults,
    check_target,
    describe_shape,
    ids_faults,
    one_tap,
    rope_readings,
    shape_faults,
)
from specdec.drafters.formats.fields import (
    dtype_name,
    fill,
    held,
    layer_parameters,
    read_ids,
    read_shape,
    shape_fields,
    shapes_of,
)
from specdec.drafters.formats.speculators import kind_of, nested_config, renamed, speculators_fields
from specdec.drafters.layers import DraftShape
from specdec.drafters.vocab import DraftVocab
from specdec.model.checkpoint import check_shapes, whole

TITLE = "EAGLE-1/2"
EMBEDDING = "embed_tokens.weight"
ASIDE = (EMBEDDING, "draft_ids")
TOKEN_MAP = "token_map.pt"  # which SGLang is told of by a flag


@dataclass(frozen=True)
class EagleMeaning(Meaning):
    """What the head of a checkpoint is."""

    shape: DraftShape
    vocab: int  # the target's tokens
    fc_bias: bool
    qkv_bias: bool
    tap: int | None = None  # the hidden state that the head reads; None for the last one
    own_embedding: bool = False


def parameters(drafter: Eagle) -> dict[str, tuple[Tensor, int, int]]:
    """Published tensor names -> where their rows lie in our modules."""
    return whole(drafter.fc, "fc") | layer_parameters(drafter, "layers.0")


def construct(meaning: EagleMeaning, tensors: Tensors, target, name: str) -> Eagle:
    """A drafter, refused unless every tensor fits the meaning and the meaning the target."""
    check_faults(faults(meaning, tensors), name)
    check_target(meaning.shape.hidden, meaning.vocab, target, name)
    check_shapes(name, tensors, expected(meaning, tensors))
    vocab = DraftVocab(meaning.vocab, read_ids(tensors))
    tap = target.config.layers if meaning.tap is None else meaning.tap
    with target.device:
        embedding = tensors[EMBEDDING].to(target.device, target.dtype) if meaning.own_embedding else target.embed.weight
        drafter = _empty(meaning, tap, vocab, embedding, target.head.weight)
        drafter.own_embedding = meaning.own_embedding
    fill(parameters(drafter), tensors, name, TITLE, aside=ASIDE)
    return drafter


def _empty(meaning: EagleMeaning, tap: int, vocab: DraftVocab, embedding: Tensor, head: Tensor) -> Eagle:
    return Eagle(meaning.shape, tap, vocab, embedding, head, meaning.fc_bias, meaning.qkv_bias)


def expected(meaning: EagleMeaning, tensors: Tensors) -> dict[str, torch.Size]:
    """Names and shapes that a checkpoint of this meaning must hold."""
    nothing = torch.empty(0, meaning.shape.hidden, device="meta")
    with torch.device("meta"):
        drafter = _empty(meaning, 0, DraftVocab(meaning.vocab), nothing, nothing)
    own = {EMBEDDING: torch.Size([meaning.vocab, meaning.shape.hidden])} if meaning.own_embedding else {}
    return shapes_of(parameters(drafter), tensors) | own


def faults(meaning: EagleMeaning, tensors: Tensors) -> list[str]:
    return shape_faults(meaning.shape) + ids_faults(meaning, tensors)


def dismantle(drafter: Eagle, target) -> tuple[EagleMeaning, Tensors]:
    """What the head is, and its tensors, without an embedding unless it is the head's own."""
    biases = drafter.fc.bias is not None, drafter.attention.qkv.bias is not None
    own = drafter.own_embedding
    meaning = EagleMeaning(drafter.shape, drafter.vocab.target_size, *biases, own_embedding=own)
    return meaning, held(parameters(drafter), drafter.vocab) | ({EMBEDDING: drafter.embedding} if own else {})


def refuse(server: str, meaning: EagleMeaning) -> None:
    """Raise ValueError for what SGLang's forward would silently compute otherwise."""
    if server == "sglang" and meaning.own_embedding:
        raise ValueError(
            "SGLang would draft wrongly with this head: it takes the target's embedding for the head's own"
        )


# The published layout


def recognise(config: dict, tensors: Tensors) -> bool:
    """EAGLE-1/2's `fc` takes two hidden states. EAGLE-3's takes three, and a head stands beside it."""
    if not {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= set(tensors) or "lm_head.weight" in tensors:
        return False
    rows, width = tensors["fc.weight"].shape
    return width == 2 * rows


def read(config: dict, tensors: Tensors, name: str) -> tuple[EagleMeaning, Tensors]:
    return _meaning(config, config.get("vocab_size"), bool(config.get("bias", True)), tensors, name), tensors


def _meaning(config: dict, vocab: int, fc_bias: bool, tensors: Tensors, name: str) -> EagleMeaning:
    if not isinstance(vocab, int):
        raise ValueError(f"{name}: config.json lacks the field 'vocab_size'")
    own = bool(config.get("own_embedding", False))
    if own and EMBEDDING not in tensors:
        raise ValueError(f"{name}: the config sets own_embedding, but the file lacks {EMBEDDING}")
    qkv_bias = "layers.0.self_attn.q_proj.bias" in tensors
    return EagleMeaning(read_shape(config, name), vocab, fc_bias, qkv_bias, own_embedding=own)


def write(meaning: EagleMeaning, tensors: Tensors, target: TargetFacts | None) -> tuple[dict, Tensors]:
    config = {
        "architectures": ["LlamaForCausalLMEagle"],
        **shape_fields(meaning.shape),
        "vocab_size": meaning.vocab,
        "bias": meaning.fc_bias,
        "dtype": dtype_name(tensors["fc.weight"]),
    }
    return config | ({"own_embedding": True} if meaning.own_embedding else {}), tensors


def write_sglang(meaning: EagleMeaning, tensors: Tensors, target: TargetFacts | None) -> tuple[dict, Tensors]:
    """SGLang's `fc` always has a bias, which stays random if the file holds none. A config's `bias` or
    `attention_bias` gives biases to q, k, v and the output of the attention there."""
    dtype = tensors["fc.weight"].dtype
    tensors = {"fc.bias": torch.zeros(meaning.shape.hidden, dtype=dtype)} | tensors
    config, tensors = write(meaning, tensors, target)
    del config["bias"]
    if meaning.qkv_bias:
        config["attention_bias"] = True
    return config, tensors


# speculators


def recognise_speculators(config: dict, tensors: Tensors) -> bool:
    return kind_of(config) == "eagle" and "fusion_fc.weight" in tensors


def read_speculators(config: dict, tensors: Tensors, name: str) -> tuple[EagleMeaning, Tensors]:
    if config.get("layernorms"):
        raise ValueError(f"{name}: layernorms is set, a variant of EAGLE with three more norms, which is not supported")
    layer = nested_config(config, name)
    tensors = renamed(renamed(tensors, "fusion_fc.", "fc."), "transformer.", "layers.0.")
    return _meaning(layer, layer["vocab_size"], bool(config.get("fusion_bias", False)), tensors, name), tensors


def write_speculators(meaning: EagleMeaning, tensors: Tensors, target: TargetFacts | None) -> tuple[dict, Tensors]:
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


# What the doctor asks


def describe(meaning: EagleMeaning, tensors: Tensors) -> dict[str, str]:
    """Every convention in force, in words."""
    biases = [name for name, there in (("fc", meaning.fc_bias), ("q, k, v", meaning.qkv_bias)) if there]
    ids = read_ids(tensors)
    return describe_shape(meaning.shape) | {
        "taps": "hidden_states[N], the last one, after the final norm",
        "fc input": "[embedding, hidden], the embedding first; no norms",
        "layer input": "fc's output as it is: the layer has no input norm",
        "feedback": "the layer's output as it is",
        "head": "the target's, without a norm before it",
        "biases": ", ".join(biases) or "none",
        "vocabulary": f"all {meaning.vocab} target tokens" if ids is None else f"{len(ids)} of {meaning.vocab} tokens",
        "embedding": "its own"
        if meaning.own_embedding
        else "the target's" + (", not the file's" if EMBEDDING in tensors else ""),
    }


def readings(meaning: EagleMeaning, tensors: Tensors, target) -> list[Reading]:
    """The plausible misreadings."""
    swapped = tensors | {"fc.weight": torch.cat(tensors["fc.weight"].chunk(2, dim=1)[::-1], dim=1)}
    return [
        *rope_readings(meaning, tensors, target),
        Reading("fc input [hidden, embedding]", meaning, swapped),
    ]


SPECULATORS = Layout(
    "speculators",
    "EAGLE-1/2 as of the first versions of speculators",
    recognise_speculators,
    read_speculators,
    write_speculators,
)
PUBLISHED = Layout("eagle", "EAGLE-1/2 as of EAGLE", recognise, read, write)
# What is written is read as the layout of EAGLE-1/2's authors.
SGLANG = Layout(
    "sglang",
    "EAGLE-1/2 as SGLang reads it",
    lambda config, tensors: False,
    read,
    write_sglang,
    beside=lambda tensors: {TOKEN_MAP: tensors["draft_ids"].tolist() if "draft_ids" in tensors else None},
)
FAMILY = Family(
    TITLE,
    construct,
    expected,
    describe,
    readings,
    dismantle,
    Eagle,
    saved_as=PUBLISHED.name,
    sign="layers.0.* with fc",
    servers={"sglang": SGLANG.name, "vllm": "vllm"},
    vllm=lambda meaning: {"method": "eagle"},
    sglang=lambda meaning: "EAGLE",
    refuse=refuse,
    faults=faults,
    streams=lambda meaning, tensors: 1,
    retap=one_tap,
    aside=ASIDE,
)
