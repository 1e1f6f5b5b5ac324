"""PARD and PARD-2: a language model's folder whose config names the mask token.

PARD-2 lists the target's hidden states as transformers counts them from the end, -1 for the last, and keeps the
projection of them in a pickle of its own, `warp_model.bin`.

Traps: no config states the number of trained tokens; our own field `block_size` does. Loaded as an ordinary language
model the drafter is a weak one, without an error.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from specdec.drafters.formats.base import Family, Layout, Meaning, Sizes, TargetFacts, Tensors
from specdec.drafters.formats.parts import BLOCK, block_doubts, describe_rope, dtype_name, number
from specdec.drafters.pard import Pard, PardForward
from specdec.drafters.vocab import DraftVocab
from specdec.model.archs import NotNative, read_config
from specdec.model.loader import target_parameters
from specdec.model.target import Target, check_taps

PROJECTION = "target_proj.weight"


@dataclass(frozen=True)
class PardMeaning(Meaning):
    """The model's config.json, and what makes a parallel drafter of it."""

    config: dict
    mask_token: int
    block: int = BLOCK
    layers: tuple[int, ...] = ()  # PARD-2: the target's hidden states from the end, -1 for the last
    scale: float = 0.02
    dim: int = 0  # PARD-2: of these states side by side

    own_embedding = True


class PardFamily(Family):
    """A language model's config states everything but the number of tokens, so there are no misreadings."""

    objective = "parallel"
    title = noun = "PARD"
    drafter = Pard
    saved_as = "pard"
    sign = "spd_type in the config"
    servers, method = MappingProxyType({"vllm": "pard"}), "draft_model"
    reads = 0

    @override
    def parameters(self, drafter: Pard) -> Tensors:
        out = target_parameters(drafter.model)
        if drafter.target_proj is not None:
            out[PROJECTION] = drafter.target_proj.weight
        return out

    @override
    def make(self, meaning: PardMeaning, taps: tuple[int, ...], vocab: DraftVocab, embedding: Tensor, head: Tensor):
        width = meaning.dim // max(len(meaning.layers), 1)
        model = Target(read_config(meaning.config, "the drafter"))
        if model.config.tied:
            model.head.weight = model.embed.weight
        forward = PardForward(meaning.mask_token, meaning.scale)
        return Pard(model, meaning.config, vocab, meaning.block, forward, taps, width)

    @override
    def taps(self, meaning: PardMeaning, layers: int) -> tuple[int, ...]:
        return tuple(layers + 1 + layer for layer in meaning.layers)

    def sizes(self, meaning: PardMeaning) -> Sizes:
        """Only the vocabulary: a draft model has a width of its own."""
        return None, meaning.config.get("vocab_size")

    @override
    def check(self, meaning: PardMeaning, tensors: Tensors, target, name: str) -> None:
        depth = target.config.layers
        taps = self.taps(meaning, depth)
        check_taps(taps, depth)
        given = len(taps) * target.config.hidden
        if meaning.layers and meaning.dim != given:
            raise ValueError(
                f"{name}: the drafter reads {meaning.dim} features, {len(taps)} states of the target give {given}"
            )

    @override
    def expected(self, meaning: PardMeaning, tensors: Tensors) -> dict[str, torch.Size]:
        with torch.device("meta"):
            vocab, nothing = DraftVocab(read_config(meaning.config, "the drafter").vocab), torch.empty(0)
            drafter = self.make(meaning, (0,) * len(meaning.layers), vocab, nothing, nothing)
        return {key: rows.shape for key, rows in self.parameters(drafter).items()}

    @override
    def faults(self, meaning: PardMeaning, tensors: Tensors) -> list[str]:
        try:
            config = read_config(meaning.config, "the drafter")
        except NotNative as error:
            return [f"PARD takes models of our own decoder only, and {error}"]
        out = []
        if not 0 <= meaning.mask_token < config.vocab:
            out.append(f"pard_token is {meaning.mask_token}, but the embedding has {config.vocab} rows")
        if meaning.block < 2:
            out.append(f"it drafts {meaning.block} tokens, and a block has 2 at least")
        if any(layer >= 0 for layer in meaning.layers):
            out.append(f"pard2_target_layers must count from the end, got {list(meaning.layers)}")
        return out

    def dismantle(self, drafter: Pard, target) -> tuple[PardMeaning, Tensors]:
        """Raises ValueError for one that proposes a part of the vocabulary."""
        if drafter.vocab.ids is not None:
            raise ValueError("PARD has no layout for a part of a vocabulary: set drafter.draft_vocab_size=null")
        how, layers = drafter.switches, tuple(tap - target.config.layers - 1 for tap in drafter.taps)
        dim = len(drafter.taps) * (drafter.tap_width or 0)
        meaning = PardMeaning(drafter.config, how.mask_token, drafter.block, layers, how.scale, dim)
        return meaning, self.parameters(drafter)

    @override
    def describe(self, meaning: PardMeaning, tensors: Tensors) -> dict[str, str]:
        config = read_config(meaning.config, "the drafter")
        reads = "tokens only"
        if meaning.layers:
            reads = f"tokens, and {meaning.scale:g} times a projection of hidden_states{list(meaning.layers)}"
        return {
            "model": f"{meaning.config.get('model_type')}, {config.layers} layers, hidden {config.hidden}",
            "rope": describe_rope(config.rope),
            "reads": reads,
            "block": f"{meaning.block} tokens, by mask token {meaning.mask_token} after the last token",
            "head": "its own",
            "vocabulary": f"all {config.vocab} target tokens, no map",
            "embedding": "its own",
        }

    @override
    def vllm(self, meaning: PardMeaning) -> dict:
        return super().vllm(meaning) | {"parallel_drafting": True}

    @override
    def refuse(self, server: str, meaning: PardMeaning) -> None:
        if meaning.layers:
            raise ValueError("vLLM drafts with PARD, and not with PARD-2 (train with drafter.taps=null)")


def read(config: dict, tensors: Tensors, name: str) -> tuple[PardMeaning, Tensors]:
    """Read a PARD or PARD-2 drafter. Raise ValueError for missing or unsupported config fields."""
    mask, layers = number(config, "pard_token", name), config.get("pard2_target_layers") or []
    if config["spd_type"] == "pard2" and not (layers and all(isinstance(layer, int) for layer in layers)):
        raise ValueError(f"{name}: pard2_target_layers must be a list of layer numbers, got {layers!r}")
    if config.get("pard2_proj_bias"):
        raise ValueError(f"{name}: pard2_proj_bias is set, and a projection with a bias is not supported")
    if config.get("tie_word_embeddings"):
        tensors = {key: tensor for key, tensor in tensors.items() if key != "lm_head.weight"}
    own = {key: value for key, value in config.items() if not key.startswith(("pard", "spd_type", "block_size"))}
    two: dict[str, Any] = {}
    if layers:
        held = tensors.get(PROJECTION)
        dim = config.get("pard2_target_dim") or (0 if held is None else held.shape[1])
        two = {"layers": tuple(layers), "scale": float(config.get("pard2_scale", 0.02)), "dim": dim}
    return PardMeaning(own, mask, config.get("block_size") or BLOCK, **two), tensors


def write(meaning: PardMeaning, tensors: Tensors, target: TargetFacts | None) -> tuple[dict, Tensors]:
    """Write a PARD drafter, or a PARD-2 drafter if it reads hidden states of the target."""
    config = meaning.config | {"pard_token": meaning.mask_token, "block_size": meaning.block}
    config |= {"spd_type": "pard", "dtype": dtype_name(tensors["model.norm.weight"])}
    if meaning.layers:
        config |= {
            "spd_type": "pard2",
            "pard2": True,
            "pard2_scale": meaning.scale,
            "pard2_proj_bias": False,
            "pard2_target_dim": meaning.dim,
            "pard2_target_layers": list(meaning.layers),
        }
    return config, tensors


LAYOUT = Layout(
    "pard",
    "PARD as of its authors (AMD)",
    lambda config, tensors: config.get("spd_type") in ("pard", "pard2") and "model.embed_tokens.weight" in tensors,
    read,
    write,
    doubts=block_doubts,
    apart=("warp_model.bin", "target_proj."),
)
FAMILY = PardFamily()
