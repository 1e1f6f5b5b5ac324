"""P-EAGLE: what its checkpoints mean, and the layouts of SpecForge, of vLLM's `speculators`, and ours.

Names of the tensors are EAGLE-3's (`formats/eagle3.py`), with layers.1.* and so on for the layers after the first,
`mask_hidden` [1,1,F], and an embedding of the head's own.

Traps: SpecForge's config states neither the mask token nor how many tokens are drafted. Every mask row is alike, so any
number can be drafted, but only so many were trained. `mask_hidden` is in the order of the taps, as columns of `fc` are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from specdec.contracts import Drafter
from specdec.drafters.formats import eagle3_layout, speculators
from specdec.drafters.formats.base import Layout, Reading, TargetFacts, Tensors
from specdec.drafters.formats.eagle3 import EMBEDDING, Eagle3Family, Eagle3Meaning
from specdec.drafters.formats.parts import BLOCK, block_doubts, layer_parameters, number, renamed
from specdec.drafters.layers import SharedHead
from specdec.drafters.peagle import PEagle
from specdec.drafters.vocab import DraftVocab
from specdec.model.checkpoint import whole

MASK = "mask_hidden"


@dataclass(frozen=True)
class PEagleMeaning(Eagle3Meaning):
    """What the head of a checkpoint is."""

    layers: int = 4
    block: int = BLOCK
    mask_token: int = 0
    embeds: bool = True  # the file holds an embedding, which is the head's own

    @property
    @override
    def own_embedding(self) -> bool:  # type: ignore[override]
        return self.embeds


class PEagleFamily(Eagle3Family):
    """Define the family of P-EAGLE heads, which draft a block of tokens in one forward with EAGLE-3's first layer."""

    objective = "parallel"
    title = noun = "P-EAGLE"
    drafter = PEagle
    saved_as = "specdec"
    sign = MASK
    servers = MappingProxyType({"vllm": "speculators"})
    algorithm = None
    optional = ("d2t", "t2d")

    @override
    def parameters(self, drafter: PEagle) -> Tensors:
        out = super().parameters(drafter)
        for i, layer in enumerate(drafter.upper, start=1):
            out |= whole(layer.input_norm, f"layers.{i}.input_layernorm") | layer_parameters(layer, f"layers.{i}")
        return out | {EMBEDDING: drafter.embedding, MASK: drafter.mask_hidden.view(1, 1, -1)}

    @override
    def make(self, meaning: Any, taps: tuple[int, ...], vocab: DraftVocab, embedding: Tensor, head: Tensor):
        how = taps, vocab, embedding, meaning.block, meaning.mask_token, meaning.forward, meaning.tap_width
        drafter = PEagle(meaning.shape, meaning.layers, *how)
        if not meaning.own_head:
            drafter.head = SharedHead(head, vocab.ids)
        return drafter

    @override
    def construct(self, meaning: Any, tensors: Tensors, target, name: str) -> Drafter:
        if not meaning.embeds and meaning.shape.hidden == target.config.hidden:
            tensors = tensors | {EMBEDDING: target.embed.weight}  # the head's own begins as the target's
        return super().construct(meaning, tensors, target, name)

    @override
    def expected(self, meaning: Any, tensors: Tensors) -> dict[str, torch.Size]:
        shapes = super().expected(meaning, tensors)
        return shapes if meaning.embeds else {name: shape for name, shape in shapes.items() if name != EMBEDDING}

    @override
    def faults(self, meaning: Any, tensors: Tensors) -> list[str]:
        out = super().faults(meaning, tensors)
        if not 0 <= meaning.mask_token < meaning.vocab:
            out.append(f"mask_token_id is {meaning.mask_token}, but the embedding has {meaning.vocab} rows")
        if meaning.block < 2:
            out.append(f"it drafts {meaning.block} tokens, and a block has 2 at least")
        return out

    @override
    def dismantle(self, drafter: Any, target) -> tuple[PEagleMeaning, Tensors]:
        meaning, tensors = super().dismantle(drafter, target)
        own: dict[str, Any] = {"layers": drafter.depth, "block": drafter.block, "mask_token": drafter.mask_token}
        return PEagleMeaning(**vars(meaning), **own), tensors

    @override
    def describe(self, meaning: Any, tensors: Tensors) -> dict[str, str]:
        out = super().describe(meaning, tensors) | {
            "layers": f"{meaning.layers}, of which the first is EAGLE-3's",
            "block": f"{meaning.block} tokens, by mask token {meaning.mask_token} after the last token",
            "embedding": "its own" if meaning.embeds else "the target's",
        }
        del out["feedback"]
        return out

    def readings(self, meaning: Any, tensors: Tensors, target) -> list[Reading]:
        """EAGLE-3's misreadings, but for what is fed back."""
        return [r for r in super().readings(meaning, tensors, target) if not r.name.startswith("feedback")]

    @override
    def vllm(self, meaning: Any) -> dict:
        return super().vllm(meaning) | {"parallel_drafting": True}

    @override
    def refuse(self, server: str, meaning: Any) -> None:
        if meaning.forward.tap_norms:
            raise ValueError("vLLM's P-EAGLE knows no norm for each tap (train with drafter.tap_norms=false)")


# The layouts


def recognise(config: dict, tensors: Tensors) -> bool:
    """Return whether the tensors are those of a P-EAGLE head, except in the layout of the speculators library."""
    return MASK in tensors and "fc.weight" in tensors and speculators.kind_of(config) is None


def read(config: dict, tensors: Tensors, name: str) -> tuple[PEagleMeaning, Tensors]:
    """Read a P-EAGLE head. Raise ValueError if the config lacks `mask_token_id`."""
    meaning, tensors = eagle3_layout.read(config, renamed(tensors, "layers.0.", "midlayer."), name)
    return completed(meaning, tensors, number(config, "mask_token_id", name), config.get("block_size")), tensors


def completed(meaning: Eagle3Meaning, tensors: Tensors, mask: int, block: int | None) -> PEagleMeaning:
    """A P-EAGLE meaning from what EAGLE-3's fields mean."""
    layers = len({key.split(".")[1] for key in tensors if key.startswith("layers.")}) + 1
    how: dict[str, Any] = {"block": block or BLOCK, "mask_token": mask, "embeds": EMBEDDING in tensors}
    return PEagleMeaning(**vars(meaning), layers=layers, **how)


def write_own(
    meaning: PEagleMeaning, tensors: Tensors, target: TargetFacts | None, as_eagle3: Callable = eagle3_layout.write_own
) -> tuple[dict, Tensors]:
    """Write a P-EAGLE head with our field `taps`, or with the EAGLE-3 fields that `as_eagle3` writes."""
    config, tensors = as_eagle3(meaning, tensors, target)
    config |= {
        "architectures": ["PEagleDraftModel"],
        "num_hidden_layers": meaning.layers,
        "mask_token_id": meaning.mask_token,
        "block_size": meaning.block,
    }
    return config, renamed(tensors, "midlayer.", "layers.0.")


def read_speculators(config: dict, tensors: Tensors, name: str) -> tuple[PEagleMeaning, Tensors]:
    """Read a P-EAGLE head in the layout of the speculators library."""
    shared = {key: tensor for key, tensor in tensors.items() if not key.startswith("layers.") or "layers.0." in key}
    meaning, first = speculators.read(config, shared, name)
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    tensors = {key: tensor for key, tensor in tensors.items() if key not in shared} | first
    mask, block = number(config, "mask_token_id", name), methods[0].get("speculative_tokens")
    return completed(meaning, tensors, mask, block), tensors


def write_speculators(meaning: PEagleMeaning, tensors: Tensors, target: TargetFacts | None) -> tuple[dict, Tensors]:
    """Write the layout of the speculators library. Raise ValueError for q, k, v biases in more than one layer."""
    if meaning.forward.qkv_bias and meaning.layers > 1:
        raise ValueError("this layout has no biases of q, k and v (train with drafter.qkv_bias=false)")
    config, tensors = speculators.write(meaning, tensors, target)
    config |= speculators.speculators_fields("peagle", "PEagleDraftModel", target, meaning.block)
    config |= {"mask_token_id": meaning.mask_token, "embed_requires_grad": True}
    config["transformer_layer_config"]["num_hidden_layers"] = meaning.layers
    return config, renamed(tensors, "midlayer.", "layers.0.")


OWN = Layout(
    "specdec",
    "ours: SpecForge's P-EAGLE, with taps by name",
    lambda config, tensors: recognise(config, tensors) and "taps" in config,
    read,
    write_own,
)
FLAT = Layout(
    "peagle",
    "P-EAGLE as of SpecForge",
    recognise,
    read,
    partial(write_own, as_eagle3=eagle3_layout.write),
    names_layers=True,
    doubts=lambda config: [*eagle3_layout.doubts(config), *block_doubts(config)],
)
SPECULATORS = Layout(
    "speculators",
    "P-EAGLE as of speculators and vLLM",
    lambda config, tensors: speculators.kind_of(config) == "peagle" and MASK in tensors,
    read_speculators,
    write_speculators,
    names_layers=True,
)
FAMILY = PEagleFamily()
