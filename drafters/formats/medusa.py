"""The Medusa layout (FasterDecoding/Medusa): head i has residual blocks `i.j.linear`, and at last its matrix `i.k`.

Without that matrix the target's head serves all (`original_lm_head`, as vLLM calls it).
"""

from pathlib import Path

from torch import Tensor

from drafters.formats.fields import dtype_name, fill, read_ids, rows_of
from drafters.medusa import Medusa, MedusaShape
from drafters.vocab import DraftVocab
from specdec.checkpoint import whole, write_folder


def parameters(drafter: Medusa) -> dict[str, tuple[Tensor, int, int]]:
    out = {}
    for i, blocks in enumerate(drafter.blocks):
        for j, block in enumerate(blocks):
            out |= whole(block.linear, f"{i}.{j}.linear")
        if drafter.shape.own_heads:
            out |= whole(drafter.heads[i], f"{i}.{len(blocks)}")
    return out


def build(config: dict, tensors: dict[str, Tensor], target, name: str) -> Medusa:
    """Heads from a parsed config and its tensors, refused unless every one of them fits the target."""
    heads = len({key.split(".")[0] for key in tensors if key[0].isdigit()})
    blocks = len({key.split(".")[1] for key in tensors if key.endswith(".linear.weight")})
    hidden = tensors["0.0.linear.weight"].shape[0]
    wanted = target.config
    if hidden != wanted.hidden:
        raise ValueError(f"{name}: the drafter's hidden size is {hidden}, the target's is {wanted.hidden}")
    vocab = config.get("vocab_size", wanted.vocab)
    if vocab != wanted.vocab:
        raise ValueError(f"{name}: the drafter is for a vocabulary of {vocab}, the target's is {wanted.vocab}")
    shape = MedusaShape(hidden, heads, blocks, own_heads=f"0.{blocks}.weight" in tensors)
    drafter = Medusa(shape, wanted.layers, DraftVocab(wanted.vocab, read_ids(tensors)), target.head.weight)
    fill(parameters(drafter), tensors, name, "Medusa", aside=("draft_ids",))
    return drafter


def save(drafter: Medusa, folder: Path, target=None) -> None:
    tensors = rows_of(parameters(drafter))
    if drafter.vocab.ids is not None:
        tensors["draft_ids"] = drafter.vocab.ids
    shape = drafter.shape
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": shape.hidden,
        "medusa_num_heads": shape.heads,
        "medusa_num_layers": shape.blocks,
        "vocab_size": drafter.vocab.target_size,
        "original_lm_head": not shape.own_heads,
        "dtype": dtype_name(drafter.blocks[0][0].linear.weight),
    }
    write_folder(folder, config, tensors)
