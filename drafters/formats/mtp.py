"""MTP heads in a folder of their own, under MiMo's names: `model.mtp_layers.{i}.*`, with our `mtp` in the config.

Traps: MiMo's projection takes [hidden, embedding], everybody else's [embedding, hidden] (`hidden_first`). Systems that
run the same weights differ in what a head feeds back when it drafts more than one token (`feedback`).
"""

import dataclasses
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

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
from specdec.drafters.layers import DraftShape
from specdec.drafters.mtp import Mtp, MtpForward
from specdec.drafters.vocab import DraftVocab
from specdec.model.checkpoint import check_shapes, whole
from specdec.schema import check

PREFIX = "model.mtp_layers"


@dataclass(frozen=True)
class MtpMeaning(Meaning):
    """What the heads of a checkpoint are."""

    shape: DraftShape
    vocab: int  # the target's tokens
    heads: int
    forward: MtpForward
    tap: int | None = None  # the hidden state that the heads read; None for the last one


def parameters(drafter: Mtp) -> dict[str, tuple[Tensor, int, int]]:
    """MiMo's tensor names -> where their rows lie in our modules."""
    out = {}
    for i, block in enumerate(drafter.blocks):
        at = f"{PREFIX}.{i}"
        out |= (
            whole(block.embed_norm, f"{at}.token_layernorm")
            | whole(block.hidden_norm, f"{at}.hidden_layernorm")
            | whole(block.project, f"{at}.input_proj")
            | whole(block.input_norm, f"{at}.input_layernorm")
            | whole(block.norm, f"{at}.final_layernorm")
            | layer_parameters(block, at)
        )
    return out


def construct(meaning: MtpMeaning, tensors: Tensors, target, name: str) -> Mtp:
    """A drafter, refused unless every tensor fits the meaning and the meaning the target."""
    check_faults(faults(meaning, tensors), name)
    check_target(meaning.shape.hidden, meaning.vocab, target, name)
    check_shapes(name, tensors, expected(meaning, tensors))
    vocab = DraftVocab(meaning.vocab, read_ids(tensors))
    tap = target.config.layers if meaning.tap is None else meaning.tap
    with target.device:
        drafter = _empty(meaning, tap, vocab, target.embed.weight, target.head.weight)
    fill(parameters(drafter), tensors, name, "an MTP head", aside=("draft_ids",))
    return drafter


def _empty(meaning: MtpMeaning, tap: int, vocab: DraftVocab, embedding: Tensor, head: Tensor) -> Mtp:
    return Mtp(meaning.shape, tap, vocab, embedding, head, heads=meaning.heads, forward=meaning.forward)


def expected(meaning: MtpMeaning, tensors: Tensors) -> dict[str, torch.Size]:
    """Names and shapes that a checkpoint of this meaning must hold."""
    nothing = torch.empty(0, meaning.shape.hidden, device="meta")
    with torch.device("meta"):
        drafter = _empty(meaning, 0, DraftVocab(meaning.vocab), nothing, nothing)
    return shapes_of(parameters(drafter), tensors)


def faults(meaning: MtpMeaning, tensors: Tensors) -> list[str]:
    return shape_faults(meaning.shape) + ids_faults(meaning, tensors)


def dismantle(drafter: Mtp, target) -> tuple[MtpMeaning, Tensors]:
    """What the heads are, and their tensors."""
    meaning = MtpMeaning(drafter.shape, drafter.vocab.target_size, len(drafter.blocks), drafter.switches)
    return meaning, held(parameters(drafter), drafter.vocab)


def recognise(config: dict, tensors: Tensors) -> bool:
    return any(name.startswith(PREFIX) for name in tensors)


def read(config: dict, tensors: Tensors, name: str) -> tuple[MtpMeaning, Tensors]:
    """What a checkpoint means. A config without `mtp` is MiMo's own, where the hidden state comes first."""
    check(MtpForward, config.get("mtp", {}), f"{name}: config.json: mtp")
    try:
        how = MtpForward(**config.get("mtp", {"hidden_first": True}))
    except TypeError as error:
        raise ValueError(f"{name}: config.json's mtp field does not fit: {error}") from None
    if not isinstance(config.get("vocab_size"), int):
        raise ValueError(f"{name}: config.json lacks the field 'vocab_size'")
    how = dataclasses.replace(how, qkv_bias=f"{PREFIX}.0.self_attn.q_proj.bias" in tensors)
    heads = len({key.split(".")[2] for key in tensors if key.startswith(PREFIX)})
    return MtpMeaning(read_shape(config, name), config["vocab_size"], heads, how), tensors


def write(meaning: MtpMeaning, tensors: Tensors, target: TargetFacts | None) -> tuple[dict, Tensors]:
    config = {
        "architectures": ["MtpDrafter"],
        **shape_fields(meaning.shape),
        "num_nextn_predict_layers": meaning.heads,
        "vocab_size": meaning.vocab,
        "mtp": asdict(meaning.forward),
        "dtype": dtype_name(tensors[f"{PREFIX}.0.input_proj.weight"]),
    }
    return config, tensors


def describe(meaning: MtpMeaning, tensors: Tensors) -> dict[str, str]:
    """Every convention in force, in words."""
    how, ids = meaning.forward, read_ids(tensors)
    order = (
        "[norm(hidden), norm(embedding)], the hidden state first"
        if how.hidden_first
        else "[norm(embedding), norm(hidden)], the embedding first"
    )
    return describe_shape(meaning.shape) | {
        "heads": f"{meaning.heads}; level l is drafted by head l, further levels by the last",
        "taps": "hidden_states[N], the last one, after the final norm",
        "projection input": order,
        "feedback": f"the hidden state {'after' if how.feedback == 'post' else 'before'} the final norm",
        "position 0": "embedding blanked" if how.blank_first else "embedding as everywhere",
        "biases": "q, k, v" if how.qkv_bias else "none",
        "head": "the target's, after the head's own final norm",
        "vocabulary": f"all {meaning.vocab} target tokens" if ids is None else f"{len(ids)} of {meaning.vocab} tokens",
        "embedding": "the target's",
    }


def readings(meaning: MtpMeaning, tensors: Tensors, target) -> list[Reading]:
    """The plausible misreadings."""
    how, replace = meaning.forward, dataclasses.replace
    order = replace(how, hidden_first=not how.hidden_first)
    other = "pre" if how.feedback == "post" else "post"
    exchanged = dict(tensors)
    for i in range(meaning.heads):
        a, b = (f"{PREFIX}.{i}.{norm}_layernorm.weight" for norm in ("token", "hidden"))
        exchanged |= {a: tensors[b], b: tensors[a]}
    return [
        *rope_readings(meaning, tensors, target),
        Reading(
            f"projection input {'[hidden, embedding]' if order.hidden_first else '[embedding, hidden]'}",
            replace(meaning, forward=order),
            tensors,
        ),
        Reading(
            f"feedback {'before' if other == 'pre' else 'after'} the final norm",
            replace(meaning, forward=replace(how, feedback=other)),
            tensors,
        ),
        Reading("norms of embedding and hidden exchanged", meaning, exchanged),
    ]


LAYOUT = Layout("mimo", "MTP heads under MiMo's names, in a folder of their own", recognise, read, write)
FAMILY = Family(
    "MTP",
    construct,
    expected,
    describe,
    readings,
    dismantle,
    Mtp,
    saved_as=LAYOUT.name,
    sign=f"{PREFIX}.*",
    faults=faults,
    streams=lambda meaning, tensors: 1,
    retap=one_tap,
)
