"""The drafters of tests/golden/blocks."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from specdec.contracts import Drafter, DraftState
from specdec.drafters.dflash import BlockDrafter
from specdec.drafters.formats import recognise
from specdec.drafters.parallel import ParallelDrafter
from specdec.model.archs import ModelConfig
from specdec.model.rope import Rope
from specdec.model.target import Target
from specdec.trees import Chain

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


def golden_drafter(
    name: str, model: str = "dflash", keeps: bool = False, extra: dict | None = None, **changes
) -> BlockDrafter | ParallelDrafter:
    """The golden weights of a model, read by the config of this name with other fields. keeps: the file of a block
    drafter also holds its copies of the target's."""
    held = load_file(GOLDEN / f"{model}_model.safetensors")
    embedding = next(tensor for key, tensor in held.items() if key.endswith("embed_tokens.weight"))
    ends = {"embed_tokens.weight": embedding, "lm_head.weight": torch.zeros(320, 64)}
    if model not in ("peagle", "pard"):
        ends["lm_head.weight"] = held["lm_head.weight"]
        held = held if keeps else {key: tensor for key, tensor in held.items() if key not in ends}
    tensors, config = held | (extra or {}), json.loads((GOLDEN / f"{name}.json").read_text()) | changes
    family, layout = recognise(config, tensors, name)
    return family.construct(*layout.read(config, tensors, name), golden_target(ends), name).eval()


def absorb(
    drafter: Drafter, feats: Tensor | None, tokens: Tensor, seen: int = 0, lens: Tensor | None = None
) -> DraftState:
    """The state after tokens [B,n] and their features, before which texts of `seen` positions were absorbed. lens [B]:
    how many of the tokens count; None: all."""
    lens = torch.full((len(tokens),), tokens.shape[1]) if lens is None else lens
    if seen:
        return drafter.extend(feats, tokens, lens, seen + tokens.shape[1])
    drafter.reset(len(tokens), 64)
    return drafter.admit(0, tokens[:, 0], feats, tokens, lens)


def drafted(drafter: Drafter, state: DraftState, steps: int | None = None) -> list[list[int]]:
    """The tokens of the chain that is drafted after a state."""
    tree = Chain(steps or drafter.block).grow(drafter, torch.zeros(1, dtype=torch.int64), state)
    return tree.tokens[:, 1:].tolist()


def golden_heads(reference: dict, kind: str) -> dict:
    """The tensors of DSpark's heads of a kind, by their published names."""
    names = (f"{kind}.markov_head", f"{kind}.confidence_head")
    return {k.removeprefix(f"{kind}."): v for k, v in reference.items() if k.startswith(names)}
