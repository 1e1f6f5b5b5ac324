"""What vLLM 0.32 loads, where no published layout says the same (`scripts/check_in_vllm.py` tries it).

EAGLE-3 is the speculators layout, with a copy of the target's embedding, which the library leaves undefined otherwise.
vLLM has the target's last hidden state only as it is before the final norm. A head that reads it after that norm, with
a norm for each tap, can still be expressed: `norm_before_fc` and `fc_norm` are both on there, and the first one holds
the weight of the target's final norm. Its scale cancels in the second. The library itself does not know this form.

EAGLE-1/2 is the layout of its authors as a LlamaForCausalLM. vLLM's `fc` has no bias, and a config's `bias` means that
of the attention there. So `fc` leaves the embedding's half and the bias to an embedding of the head's own.

Medusa has other fields, and the target's head as that of the first head. There is a `token_map` for a draft vocabulary,
which vLLM 0.32 does not load: its loader misses the weights of a tensor of that name.
"""

import dataclasses

import torch

from specdec.drafters.formats import eagle, medusa, speculators
from specdec.drafters.formats.base import Layout, TargetFacts, Tensors, needed, write_only
from specdec.drafters.formats.eagle import EMBEDDING, EagleMeaning
from specdec.drafters.formats.eagle3 import Eagle3Meaning
from specdec.drafters.formats.medusa import MedusaMeaning

INPUT_NORM = "input_norm.weight"
FINAL_NORM = {"input_norm_means": "final_norm"}  # ours, so that the file is read as what it was written from
SCALE = 16.0  # a power of two; it lifts weak taps far above the eps of the norm that follows
SHARED_HEAD = "lm_heads.0.weight"


# EAGLE-3


def write_eagle3(meaning: Eagle3Meaning, tensors: Tensors, target: TargetFacts | None) -> tuple[dict, Tensors]:
    """Write an EAGLE-3 head for vLLM, with an embedding, and with norms if it reads the state after the final norm.

    Raises ValueError without a target, or if a head that reads that state has no norm for each tap.
    """
    target = needed(target)
    if not meaning.own_embedding:
        tensors = tensors | {EMBEDDING: target.part("embedding").to(tensors["fc.weight"].dtype)}
    if target.layers not in (meaning.taps or ()):
        return speculators.spell(meaning, tensors, target)
    if not meaning.forward.tap_norms:
        raise ValueError(
            f"the drafter reads hidden state {target.layers}, which vLLM has only as it is before the final norm; with "
            "a norm for each tap it can be said (train with drafter.tap_norms=true, or with lower drafter.taps)"
        )
    try:
        norm = target.part("final_norm")
    except ValueError as error:
        raise ValueError(f"{error} (train with drafter.taps from 1 to {target.layers - 1})") from None
    gains = [norm if tap == target.layers else torch.ones_like(norm) for tap in sorted(meaning.taps or ())]
    config, tensors = speculators.spell(meaning, tensors, target)
    return config | {"norm_before_fc": True} | FINAL_NORM, tensors | {INPUT_NORM: torch.cat(gains) * SCALE}


def read_eagle3(config: dict, tensors: Tensors, name: str) -> tuple[Eagle3Meaning, Tensors]:
    """Read an EAGLE-3 head that was exported for vLLM, without the norm that the export added."""
    tensors = {key: tensor for key, tensor in tensors.items() if key != INPUT_NORM}
    return speculators.read(config | {"norm_before_fc": False}, tensors, name)


# EAGLE-1/2


def write_eagle(meaning: EagleMeaning, tensors: Tensors, target: TargetFacts | None) -> tuple[dict, Tensors]:
    """Write an EAGLE-1/2 head for vLLM, which has no bias in `fc`: the bias moves into an own embedding."""
    check_all_tokens(tensors, "EAGLE-1/2", "this one")
    tensors = dict(tensors)
    if meaning.fc_bias:
        embedding = tensors[EMBEDDING] if meaning.own_embedding else needed(target).part("embedding")
        tensors |= without_bias(tensors["fc.weight"], tensors.pop("fc.bias"), embedding)
        meaning = dataclasses.replace(meaning, own_embedding=True, fc_bias=False)
    config, tensors = eagle.write(meaning, tensors, target)
    fields = {"architectures": ["LlamaForCausalLM"], "attention_bias": False, "qkv_bias": meaning.qkv_bias}
    return config | fields, tensors


def without_bias(fc: torch.Tensor, bias: torch.Tensor, embedding: torch.Tensor) -> Tensors:
    """An `fc` [H,2H] of the same output without a bias, and the embedding [V,H] that makes it so.

    The embedding stays in fp32: rounded to 16 bits it would not be the product that decoding here computes.
    """
    ours, hidden = fc.float().chunk(2, dim=1)
    made = embedding.to(fc.device).float() @ ours.T + bias.float()
    eye = torch.eye(len(fc), dtype=fc.dtype, device=fc.device)
    return {"fc.weight": torch.cat([eye, hidden.to(fc.dtype)], dim=1), EMBEDDING: made}


def check_all_tokens(tensors: Tensors, kind: str, this: str) -> None:
    """Raise ValueError for a head that proposes a part of the target's tokens."""
    if "draft_ids" in tensors:
        raise ValueError(
            f"vLLM's {kind} heads propose all tokens of the target, and {this} only some (train with "
            "drafter.draft_vocab_size=null)"
        )


# Medusa


def write_medusa(meaning: MedusaMeaning, tensors: Tensors, target: TargetFacts | None) -> tuple[dict, Tensors]:
    """Write Medusa heads for vLLM, with a copy of the target's head if they share it."""
    target, shape = needed(target), meaning.shape
    check_all_tokens(tensors, "Medusa", "these")
    config, tensors = medusa.write(meaning, tensors, target)
    config |= {"num_heads": shape.heads, "num_hidden_layers": shape.blocks, "medusa_fc_bias": True}
    if shape.own_heads:
        return config, tensors
    head = target.part("head").to(tensors["0.0.linear.weight"].dtype)
    return config | {"vocab_size": len(head)}, tensors | {SHARED_HEAD: head}


def read_medusa(config: dict, tensors: Tensors, name: str) -> tuple[MedusaMeaning, Tensors]:
    """Read Medusa heads that were exported for vLLM. Raise ValueError for heads without biases."""
    if not config["medusa_fc_bias"]:
        raise ValueError(f"{name}: medusa_fc_bias is false, and Medusa heads without biases are not supported")
    return medusa.read(config, {key: tensor for key, tensor in tensors.items() if key != SHARED_HEAD}, name)


def notes(config: dict) -> list[str]:
    """Notes for users of an export: what it costs, and which programs do not read it."""
    out = []
    if FINAL_NORM.items() <= config.items():
        out.append(
            "the last tap is read before the target's final norm, whose weight is in input_norm; vLLM reads this, the "
            "speculators library does not"
        )
    if config.get("own_embedding"):
        out.append(
            f"the bias of fc is in an embedding of the head's own, {config['vocab_size']} x {config['hidden_size']} "
            "numbers in addition to the target's (heads trained with drafter.fc_bias=false need none)"
        )
    if "medusa_fc_bias" in config:
        out.append("vLLM decodes with Medusa heads up to version 0.32 only")
    return out


EAGLE3 = Layout(
    "vllm",
    "EAGLE-3 as vLLM reads it",
    lambda config, tensors: FINAL_NORM.items() <= config.items() and speculators.EAGLE3.recognise(config, tensors),
    read_eagle3,
    write_eagle3,
    names_layers=True,
)
EAGLE = write_only("vllm", "EAGLE-1/2 as vLLM reads it", write_eagle)
MEDUSA = Layout(
    "vllm",
    "Medusa as vLLM reads it",
    lambda config, tensors: "medusa_fc_bias" in config and medusa.LAYOUT.recognise(config, tensors),
    read_medusa,
    write_medusa,
)
