"""PARD and PARD-2: a language model's folder whose config names the mask token.

PARD-2 lists the target's hidden states as transformers counts them from the end, -1 for the last, and keeps the
projection of them in a pickle of its own, `warp_model.bin`.

Traps: no config says how many tokens were learnt; our own field `block_size` does. Loaded as an ordinary language model
the drafter is a weak one, and no error is seen.
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
    describe_rope,
)
from specdec.drafters.formats.fields import dtype_name, fill, rows_of
from specdec.drafters.pard import Pard, PardForward
from specdec.drafters.vocab import DraftVocab
from specdec.model.archs import NotNative, read_config
from specdec.model.checkpoint import check_shapes
from specdec.model.loader import target_parameters
from specdec.model.target import Target, check_taps

BLOCK = 8  # how many tokens PARD's authors train
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


def parameters(drafter: Pard) -> dict[str, tuple[Tensor, int, int]]:
    """Tensor names -> where their rows lie in our modules."""
    out = target_parameters(drafter.model)
    if drafter.target_proj is not None:
        out[PROJECTION] = (drafter.target_proj.weight, 0, len(drafter.target_proj.weight))
    return out


def construct(meaning: PardMeaning, tensors: Tensors, target, name: str) -> Pard:
    """A drafter, refused unless every tensor fits the meaning and the meaning the target."""
    check_faults(faults(meaning, tensors), name)
    config = read_config(meaning.config, name)
    if config.vocab != target.vocab:
        raise ValueError(f"{name}: the drafter is for a vocabulary of {config.vocab}, the target's is {target.vocab}")
    depth, width = target.config.layers, target.config.hidden
    taps = tuple(depth + 1 + layer for layer in meaning.layers)
    check_taps(taps, depth)
    if meaning.layers and meaning.dim != len(taps) * width:
        raise ValueError(f"{name}: the drafter reads {meaning.dim} features, {len(taps)} states of the target give "
                         f"{len(taps) * width}")  # fmt: skip
    check_shapes(name, tensors, expected(meaning, tensors))
    with target.device:
        drafter = _empty(meaning, taps, width, name)
    fill(parameters(drafter), tensors, name, "PARD")
    return drafter


def _empty(meaning: PardMeaning, taps: tuple[int, ...], width: int, name: str) -> Pard:
    model = Target(read_config(meaning.config, name))
    if model.config.tied:
        model.head.weight = model.embed.weight
    forward = PardForward(meaning.mask_token, meaning.scale)
    return Pard(model, meaning.config, DraftVocab(model.vocab), meaning.block, forward, taps, width)


def expected(meaning: PardMeaning, tensors: Tensors) -> dict[str, torch.Size]:
    """Names and shapes that a checkpoint of this meaning must hold."""
    with torch.device("meta"):
        count = len(meaning.layers)
        drafter = _empty(meaning, (0,) * count, meaning.dim // max(count, 1), "the drafter")
    return {key: rows.shape for key, rows in rows_of(parameters(drafter)).items()}


def faults(meaning: PardMeaning, tensors: Tensors) -> list[str]:
    """What else than a tensor's name or shape keeps a checkpoint from loading."""
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


def dismantle(drafter: Pard, target) -> tuple[PardMeaning, Tensors]:
    """What the drafter is, and its tensors. Raises ValueError for one that proposes a part of the vocabulary."""
    if drafter.vocab.ids is not None:
        raise ValueError("PARD has no layout for a part of a vocabulary: set drafter.draft_vocab_size=null")
    how, layers = drafter.switches, tuple(tap - target.config.layers - 1 for tap in drafter.taps)
    dim = len(drafter.taps) * (drafter.tap_width or 0)
    meaning = PardMeaning(drafter.config, how.mask_token, drafter.block, layers, how.scale, dim)
    return meaning, rows_of(parameters(drafter))


def describe(meaning: PardMeaning, tensors: Tensors) -> dict[str, str]:
    """Every convention in force, in words."""
    config = read_config(meaning.config, "the drafter")
    reads = "tokens only"
    if meaning.layers:
        reads = f"tokens, and {meaning.scale:g} times a projection of hidden_states{list(meaning.layers)}"
    return {
        "model": f"{meaning.config.get('model_type')}, {config.layers} layers, hidden {config.hidden}",
        "rope": describe_rope(config.rope),
        "reads": reads,
        "block": f"{meaning.block} tokens, by mask token {meaning.mask_token} behind the last token",
        "head": "its own",
        "vocabulary": f"all {config.vocab} target tokens, no map",
        "embedding": "its own",
    }


def readings(meaning: PardMeaning, tensors: Tensors, target) -> list[Reading]:
    """None: a language model's config states everything but the number of tokens."""
    return []


def recognise(config: dict, tensors: Tensors) -> bool:
    return config.get("spd_type") in ("pard", "pard2") and "model.embed_tokens.weight" in tensors


def read(config: dict, tensors: Tensors, name: str) -> tuple[PardMeaning, Tensors]:
    mask, layers = config.get("pard_token"), config.get("pard2_target_layers") or []
    if not isinstance(mask, int):
        raise ValueError(f"{name}: config.json lacks the number pard_token")
    if config["spd_type"] == "pard2" and not (layers and all(isinstance(layer, int) for layer in layers)):
        raise ValueError(f"{name}: pard2_target_layers must be a list of layer numbers, got {layers!r}")
    if config.get("pard2_proj_bias"):
        raise ValueError(f"{name}: pard2_proj_bias is set, and a projection with a bias is not supported")
    if config.get("tie_word_embeddings"):
        tensors = {key: tensor for key, tensor in tensors.items() if key != "lm_head.weight"}
    own = {key: value for key, value in config.items() if not key.startswith(("pard", "spd_type", "block_size"))}
    two = {}
    if layers:
        held = tensors.get(PROJECTION)
        dim = config.get("pard2_target_dim") or (0 if held is None else held.shape[1])
        two = {"layers": tuple(layers), "scale": float(config.get("pard2_scale", 0.02)), "dim": dim}
    return PardMeaning(own, mask, config.get("block_size") or BLOCK, **two), tensors


def write(meaning: PardMeaning, tensors: Tensors, target: TargetFacts | None) -> tuple[dict, Tensors]:
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


def doubts(config: dict) -> list[str]:
    if "block_size" in config:
        return []
    return [f"how many tokens it has learnt to draft is not stated: {BLOCK} are taken"]


def refuse(server: str, meaning: PardMeaning) -> None:
    """Raise ValueError for what vLLM's draft model would silently leave out."""
    if meaning.layers:
        raise ValueError("vLLM drafts with PARD, and not with PARD-2 (train with drafter.taps=null)")


LAYOUT = Layout(
    "pard",
    "PARD as of its authors (AMD)",
    recognise,
    read,
    write,
    doubts=doubts,
    apart=("warp_model.bin", "target_proj."),
)
FAMILY = Family(
    "PARD",
    construct,
    expected,
    describe,
    readings,
    dismantle,
    Pard,
    saved_as=LAYOUT.name,
    sign="spd_type in the config",
    servers={"vllm": LAYOUT.name},
    vllm=lambda meaning: {"method": "draft_model", "parallel_drafting": True},
    refuse=refuse,
    faults=faults,
)
