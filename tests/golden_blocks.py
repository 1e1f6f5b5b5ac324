"""The drafters of tests/golden/blocks."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from specdec.drafters.dflash import BlockDrafter
from specdec.drafters.formats import recognise
from specdec.drafters.parallel import ParallelDrafter
from specdec.model.archs import ModelConfig
from specdec.model.rope import Rope
from specdec.model.target import Target

GOLDEN = Path(__file__).parent / "golden" / "blocks"


def golden_target(tensors: dict, layers: int = 12) -> Target:
    """A stand-in: only its embedding, its head, its size and its depth matter here."""
    config = ModelConfig(
        layers=layers, hidden=64, intermediate=8, heads=4, kv_heads=2, head_dim=16, vocab=320, eps=1e-5, rope=Rope(),
        context=512, tied=False,
    )  # fmt: skip
    target = Target(config)
    target.embed.weight.copy_(tensors["embed_tokens.weight"])
    target.head.weight.copy_(tensors["lm_head.weight"])
    return target


def golden_drafter(name: str, model: str = "dflash", keeps: bool = False, extra=None, **changes) -> BlockDrafter:
    """The golden weights, read by the config of this name with other fields. keeps: the file also holds the copies of
    the target's."""
    held = load_file(GOLDEN / f"{model}_model.safetensors")
    target = golden_target(held)
    tensors = {k: v for k, v in held.items() if keeps or k not in ("embed_tokens.weight", "lm_head.weight")}
    config = json.loads((GOLDEN / f"{name}.json").read_text()) | changes
    family, layout = recognise(config, tensors | (extra or {}), name)
    return family.construct(*layout.read(config, tensors | (extra or {}), name), target, name).eval()


def golden_parallel(name: str, model: str, extra: dict | None = None, **changes) -> ParallelDrafter:
    """The golden weights of P-EAGLE or PARD, read by the config of this name with other fields."""
    tensors = load_file(GOLDEN / f"{model}_model.safetensors") | (extra or {})
    embedding = next(tensor for key, tensor in tensors.items() if key.endswith("embed_tokens.weight"))
    target = golden_target({"embed_tokens.weight": embedding, "lm_head.weight": torch.zeros(320, 64)})
    config = json.loads((GOLDEN / f"{name}.json").read_text()) | changes
    family, layout = recognise(config, tensors, name)
    return family.construct(*layout.read(config, tensors, name), target, name).eval()


def golden_heads(reference: dict, kind: str) -> dict:
    """The tensors of DSpark's heads of a kind, by their published names."""
    names = (f"{kind}.markov_head", f"{kind}.confidence_head")
    return {k.removeprefix(f"{kind}."): v for k, v in reference.items() if k.startswith(names)}
