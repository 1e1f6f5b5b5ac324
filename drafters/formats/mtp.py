"""MTP heads in a folder of their own, under MiMo's names: `model.mtp_layers.{i}.*`, with our `mtp` in the config.

Traps: MiMo's projection takes [hidden, embedding], everybody else's [embedding, hidden] (`hidden_first`). Systems that
run the same weights differ in what a head feeds back when it drafts more than one token (`feedback`).
"""

import dataclasses
from dataclasses import asdict, dataclass

from torch import Tensor
from typing_extensions import override

from specdec.drafters.formats.base import Family, Layout, Meaning, Reading, TargetFacts, Tensors
from specdec.drafters.formats.parts import (
    describe_ids,
    describe_shape,
    dtype_name,
    held,
    layer_parameters,
    number,
    read_shape,
)
from specdec.drafters.layers import DraftShape, shape_fields
from specdec.drafters.mtp import Experts, Mtp, MtpForward
from specdec.drafters.vocab import DraftVocab
from specdec.model.checkpoint import whole
from specdec.schema import check

PREFIX = "model.mtp_layers"
NAMES = {  # the parts of a head except its decoder layer: ours -> MiMo's
    "embed_norm": "token_layernorm",
    "hidden_norm": "hidden_layernorm",
    "project": "input_proj",
    "norm": "final_layernorm",
}
WORDS = {"pre": "before the final norm", "post": "after the final norm"}  # what is fed back


@dataclass(frozen=True)
class MtpMeaning(Meaning):
    """What the heads of a checkpoint are."""

    shape: DraftShape
    vocab: int  # the target's tokens
    heads: int
    forward: MtpForward
    taps: tuple[int, ...] | None = None  # None: the last hidden state


class MtpFamily(Family):
    """Define the family of multi-token prediction (MTP) heads."""

    objective = "mtp"
    title, noun = "MTP", "an MTP head"
    drafter = Mtp
    saved_as = "mimo"
    sign = f"{PREFIX}.*"
    optional = ("draft_ids",)

    @override
    def make(self, meaning: MtpMeaning, taps: tuple[int, ...], vocab: DraftVocab, embedding: Tensor, head: Tensor):
        return Mtp(meaning.shape, taps[0], vocab, embedding, head, heads=meaning.heads, forward=meaning.forward)

    @override
    def parameters(self, drafter: Mtp) -> Tensors:
        out: Tensors = {}
        for i, block in enumerate(drafter.blocks):
            head = f"{PREFIX}.{i}"
            out |= whole(block.input_norm, f"{head}.input_layernorm") | layer_parameters(block, head)
            for ours, theirs in NAMES.items():
                out |= whole(block.get_submodule(ours), f"{head}.{theirs}")
        return out

    @override
    def dismantle(self, drafter: Mtp, target) -> tuple[MtpMeaning, Tensors]:
        meaning = MtpMeaning(drafter.shape, drafter.vocab.target_size, len(drafter.blocks), drafter.switches)
        return meaning, held(self.parameters(drafter), drafter.vocab)

    @override
    def describe(self, meaning: MtpMeaning, tensors: Tensors) -> dict[str, str]:
        how = meaning.forward
        order = (
            "[norm(hidden), norm(embedding)], the hidden state first"
            if how.hidden_first
            else "[norm(embedding), norm(hidden)], the embedding first"
        )
        experts = how.experts
        return describe_shape(meaning.shape) | {
            "experts": f"{experts.chosen} of {experts.count} for each token" if experts else "none",
            "heads": f"{meaning.heads}; level l is drafted by head l, further levels by the last",
            "taps": "hidden_states[N], the last one, after the final norm",
            "projection input": order,
            "feedback": f"the hidden state {WORDS[how.feedback]}",
            "position 0": "embedding blanked" if how.blank_first else "embedding as everywhere",
            "biases": "q, k, v" if how.qkv_bias else "none",
            "norms": "weights stored less 1" if how.offset_norms else "weights as they are",
            "head": "the target's, after the head's own final norm",
            "vocabulary": describe_ids(tensors, meaning.vocab),
            "embedding": "the target's",
        }

    @override
    def readings(self, meaning: MtpMeaning, tensors: Tensors, target) -> list[Reading]:
        how, replace = meaning.forward, dataclasses.replace
        order = replace(how, hidden_first=not how.hidden_first)
        words = "[hidden, embedding]" if order.hidden_first else "[embedding, hidden]"
        other = "pre" if how.feedback == "post" else "post"
        fed = replace(meaning, forward=replace(how, feedback=other))
        exchanged = dict(tensors)
        for i in range(meaning.heads):
            a, b = (f"{PREFIX}.{i}.{norm}_layernorm.weight" for norm in ("token", "hidden"))
            exchanged |= {a: tensors[b], b: tensors[a]}
        return [
            *self.rope_readings(meaning, tensors, target),
            Reading(f"projection input {words}", replace(meaning, forward=order), tensors),
            Reading(f"feedback {WORDS[other]}", fed, tensors),
            Reading("norms of embedding and hidden exchanged", meaning, exchanged),
        ]


def read(config: dict, tensors: Tensors, name: str) -> tuple[MtpMeaning, Tensors]:
    """What a checkpoint means. A config without `mtp` is MiMo's own, where the hidden state comes first."""
    stated = dict(config.get("mtp", {"hidden_first": True}))
    check(MtpForward, stated, f"{name}: config.json: mtp")
    try:
        if stated.get("experts"):
            check(Experts, stated["experts"], f"{name}: config.json: mtp.experts")
            stated["experts"] = Experts(**stated["experts"])
        how = MtpForward(**stated)
    except TypeError as error:
        raise ValueError(f"{name}: config.json's mtp field does not fit: {error}") from None
    how = dataclasses.replace(how, qkv_bias=f"{PREFIX}.0.self_attn.q_proj.bias" in tensors)
    heads = len({key.split(".")[2] for key in tensors if key.startswith(PREFIX)})
    return MtpMeaning(read_shape(config, name), number(config, "vocab_size", name), heads, how), tensors


def write(meaning: MtpMeaning, tensors: Tensors, target: TargetFacts | None) -> tuple[dict, Tensors]:
    """Write MiMo's names, with the field `mtp` for the settings of the forward."""
    config = {
        "architectures": ["MtpDrafter"],
        **shape_fields(meaning.shape),
        "num_nextn_predict_layers": meaning.heads,
        "vocab_size": meaning.vocab,
        "mtp": asdict(meaning.forward),
        "dtype": dtype_name(tensors[f"{PREFIX}.0.input_proj.weight"]),
    }
    return config, tensors


LAYOUT = Layout(
    "mimo",
    "MTP heads under MiMo's names, in a folder of their own",
    lambda config, tensors: any(name.startswith(PREFIX) for name in tensors),
    read,
    write,
)
FAMILY = MtpFamily()
