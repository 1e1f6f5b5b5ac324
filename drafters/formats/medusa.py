"""The Medusa layout (FasterDecoding/Medusa): head i has residual blocks `i.j.linear`, and behind them its matrix `i.k`.

If the matrices are absent, all heads use the target's (`original_lm_head`, as vLLM calls it).
"""

from dataclasses import dataclass

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
    ids_faults,
    one_tap,
)
from specdec.drafters.formats.fields import dtype_name, fill, held, read_ids, shapes_of
from specdec.drafters.medusa import Medusa, MedusaShape
from specdec.drafters.vocab import DraftVocab
from specdec.model.checkpoint import check_shapes, whole


@dataclass(frozen=True)
class MedusaMeaning(Meaning):
    """What the heads of a checkpoint are."""

    shape: MedusaShape
    vocab: int | None  # the target's tokens; None if nothing states them, as in the published configs
    tap: int | None = None  # the hidden state that the heads read; None for the last one


def parameters(drafter: Medusa) -> dict[str, tuple[Tensor, int, int]]:
    """Published tensor names -> where they lie in our modules."""
    out = {}
    for i, blocks in enumerate(drafter.blocks):
        for j, block in enumerate(blocks):
            out |= whole(block.linear, f"{i}.{j}.linear")
        if drafter.shape.own_heads:
            out |= whole(drafter.heads[i], f"{i}.{len(blocks)}")
    return out


def construct(meaning: MedusaMeaning, tensors: Tensors, target, name: str) -> Medusa:
    """Heads, refused unless every tensor fits the meaning and the meaning the target."""
    check_faults(ids_faults(meaning, tensors), name)
    check_target(meaning.shape.hidden, meaning.vocab or target.vocab, target, name)
    check_shapes(name, tensors, expected(meaning, tensors))
    tap = target.config.layers if meaning.tap is None else meaning.tap
    vocab = DraftVocab(target.vocab, read_ids(tensors))
    with target.device:
        drafter = Medusa(meaning.shape, tap, vocab, target.head.weight)
    fill(parameters(drafter), tensors, name, "Medusa", aside=("draft_ids",))
    return drafter


def expected(meaning: MedusaMeaning, tensors: Tensors) -> dict[str, torch.Size]:
    """Names and shapes that a checkpoint of this meaning must hold."""
    rows = len(tensors[f"0.{meaning.shape.blocks}.weight"]) if meaning.shape.own_heads else 1
    with torch.device("meta"):
        drafter = Medusa(meaning.shape, 0, DraftVocab(rows), torch.empty(0, meaning.shape.hidden))
    return shapes_of(parameters(drafter), tensors)


def dismantle(drafter: Medusa, target) -> tuple[MedusaMeaning, Tensors]:
    """What the heads are, and their tensors."""
    return MedusaMeaning(drafter.shape, drafter.vocab.target_size), held(parameters(drafter), drafter.vocab)


def recognise(config: dict, tensors: Tensors) -> bool:
    return "0.0.linear.weight" in tensors


def read(config: dict, tensors: Tensors, name: str) -> tuple[MedusaMeaning, Tensors]:
    """The tensors tell the number of heads and blocks: published configs have been wrong about them."""
    heads = len({key.split(".")[0] for key in tensors if key[0].isdigit()})
    blocks = len({key.split(".")[1] for key in tensors if key.endswith(".linear.weight")})
    hidden = tensors["0.0.linear.weight"].shape[0]
    shape = MedusaShape(hidden, heads, blocks, own_heads=f"0.{blocks}.weight" in tensors)
    return MedusaMeaning(shape, config.get("vocab_size")), tensors


def write(meaning: MedusaMeaning, tensors: Tensors, target: TargetFacts | None) -> tuple[dict, Tensors]:
    shape = meaning.shape
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": shape.hidden,
        "medusa_num_heads": shape.heads,
        "medusa_num_layers": shape.blocks,
        "original_lm_head": not shape.own_heads,
        "dtype": dtype_name(tensors["0.0.linear.weight"]),
    }
    return config | ({"vocab_size": meaning.vocab} if meaning.vocab else {}), tensors


def describe(meaning: MedusaMeaning, tensors: Tensors) -> dict[str, str]:
    """Every convention in force, in words."""
    shape, ids = meaning.shape, read_ids(tensors)
    tokens = f"all {meaning.vocab or 'of the'} target tokens" if ids is None else f"{len(ids)} target tokens"
    return {
        "heads": f"{shape.heads} of {shape.blocks} residual blocks, hidden {shape.hidden}",
        "taps": "hidden_states[N], the last one, after the final norm",
        "head": "each its own matrix" if shape.own_heads else "the target's, shared",
        "biases": "in the residual blocks",
        "vocabulary": tokens,
    }


def readings(meaning: MedusaMeaning, tensors: Tensors, target) -> list[Reading]:
    """The plausible misreading beside another tap: rows of the heads that stand in another order."""
    ids = read_ids(tensors)
    if ids is None or not meaning.shape.own_heads or torch.equal(ids, ids.sort().values):
        return []
    words = "the tokens of draft_ids in ascending order"
    return [Reading(words, meaning, tensors | {"draft_ids": ids.sort().values})]


LAYOUT = Layout("medusa", "Medusa as of its authors", recognise, read, write)
FAMILY = Family(
    "Medusa",
    construct,
    expected,
    describe,
    readings,
    dismantle,
    Medusa,
    saved_as=LAYOUT.name,
    sign="0.0.linear",
    servers={"vllm": "vllm"},
    vllm=lambda meaning: {"method": "medusa", "num_speculative_tokens": meaning.shape.heads},
    faults=ids_faults,
    streams=lambda meaning, tensors: 1,
    retap=one_tap,
)
