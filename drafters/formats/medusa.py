"""The Medusa layout (FasterDecoding/Medusa): head i has residual blocks `i.j.linear`, followed by its matrix `i.k`.

If the matrices are absent, all heads use the target's (`original_lm_head`, as vLLM calls it).
"""

from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor
from typing_extensions import override

from specdec.drafters.formats.base import Family, Layout, Meaning, Reading, TargetFacts, Tensors, ids_faults
from specdec.drafters.formats.parts import dtype_name, held
from specdec.drafters.medusa import Medusa, MedusaShape
from specdec.drafters.vocab import DraftVocab
from specdec.model.checkpoint import whole


@dataclass(frozen=True)
class MedusaMeaning(Meaning):
    """What the heads of a checkpoint are."""

    shape: MedusaShape
    vocab: int | None  # the target's tokens; None if nothing states them, as in the published configs
    taps: tuple[int, ...] | None = None  # None: the last hidden state


class MedusaFamily(Family):
    """Define the family of Medusa heads (arXiv 2401.10774)."""

    objective = "medusa"
    title = noun = "Medusa"
    drafter = Medusa
    saved_as = "medusa"
    sign = "0.0.linear"
    servers, method = MappingProxyType({"vllm": "vllm"}), "medusa"
    optional = ("draft_ids",)

    @override
    def make(self, meaning: MedusaMeaning, taps: tuple[int, ...], vocab: DraftVocab, embedding: Tensor, head: Tensor):
        return Medusa(meaning.shape, taps[0], vocab, head)

    @override
    def parameters(self, drafter: Medusa) -> Tensors:
        out: Tensors = {}
        for i, blocks in enumerate(drafter.blocks):
            for j, block in enumerate(blocks):
                out |= whole(block.linear, f"{i}.{j}.linear")
            if drafter.shape.own_heads:
                out |= whole(drafter.heads[i], f"{i}.{len(blocks)}")
        return out

    @override
    def proposed(self, meaning: MedusaMeaning, tensors: Tensors) -> int:
        return len(tensors[f"0.{meaning.shape.blocks}.weight"]) if meaning.shape.own_heads else 1

    @override
    def faults(self, meaning: MedusaMeaning, tensors: Tensors) -> list[str]:
        return ids_faults(meaning, tensors)

    @override
    def dismantle(self, drafter: Medusa, target) -> tuple[MedusaMeaning, Tensors]:
        meaning = MedusaMeaning(drafter.shape, drafter.vocab.target_size)
        return meaning, held(self.parameters(drafter), drafter.vocab)

    @override
    def describe(self, meaning: MedusaMeaning, tensors: Tensors) -> dict[str, str]:
        shape, ids = meaning.shape, tensors.get("draft_ids")
        tokens = f"all {meaning.vocab or 'of the'} target tokens" if ids is None else f"{len(ids)} target tokens"
        return {
            "heads": f"{shape.heads} of {shape.blocks} residual blocks, hidden {shape.hidden}",
            "taps": "hidden_states[N], the last one, after the final norm",
            "head": "each its own matrix" if shape.own_heads else "the target's, shared",
            "biases": "in the residual blocks",
            "vocabulary": tokens,
        }

    def readings(self, meaning: MedusaMeaning, tensors: Tensors, target) -> list[Reading]:
        """Readings with the rows of the heads in another order."""
        ids = tensors.get("draft_ids")
        if ids is None or not meaning.shape.own_heads or torch.equal(ids, ids.sort().values):
            return []
        words = "the tokens of draft_ids in ascending order"
        return [Reading(words, meaning, tensors | {"draft_ids": ids.sort().values})]

    @override
    def vllm(self, meaning: MedusaMeaning) -> dict:
        return super().vllm(meaning) | {"num_speculative_tokens": meaning.shape.heads}


def read(config: dict, tensors: Tensors, name: str) -> tuple[MedusaMeaning, Tensors]:
    """The tensors determine the number of heads and blocks: published configs have been wrong about them."""
    heads = len({key.split(".")[0] for key in tensors if key[0].isdigit()})
    blocks = len({key.split(".")[1] for key in tensors if key.endswith(".linear.weight")})
    hidden = tensors["0.0.linear.weight"].shape[0]
    shape = MedusaShape(hidden, heads, blocks, own_heads=f"0.{blocks}.weight" in tensors)
    return MedusaMeaning(shape, config.get("vocab_size")), tensors


def write(meaning: MedusaMeaning, tensors: Tensors, target: TargetFacts | None) -> tuple[dict, Tensors]:
    """Write the layout of the Medusa authors."""
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


LAYOUT = Layout("medusa", "Medusa as of its authors", lambda _, tensors: "0.0.linear.weight" in tensors, read, write)
FAMILY = MedusaFamily()
