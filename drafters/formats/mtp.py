"""MTP heads in a folder of their own, under MiMo's names: `model.mtp_layers.{i}.*`, with our `mtp` in the config.

Traps: MiMo's projection takes [hidden, embedding], everybody else's [embedding, hidden] (`hidden_first`); what a head
feeds back when it drafts more than one token differs between systems that run the same weights (`feedback`).
"""

from dataclasses import asdict
from pathlib import Path

from torch import Tensor

from drafters.formats.fields import (
    check_fit,
    dtype_name,
    fill,
    layer_parameters,
    read_ids,
    read_shape,
    rows_of,
    shape_fields,
)
from drafters.mtp import Mtp, MtpForward
from drafters.vocab import DraftVocab
from specdec.checkpoint import whole, write_folder

PREFIX = "model.mtp_layers"


def parameters(drafter: Mtp) -> dict[str, tuple[Tensor, int, int]]:
    out = {}
    for i, block in enumerate(drafter.blocks):
        at = f"{PREFIX}.{i}"
        out |= (
            whole(block.embed_norm, f"{at}.token_layernorm")
            | whole(block.hidden_norm, f"{at}.hidden_layernorm")
            | whole(block.project, f"{at}.input_proj")
            | whole(block.input_norm, f"{at}.input_layernorm")
            | whole(block.norm, f"{at}.final_layernorm")
            | layer_parameters(block, at)
        )
    return out


def build(config: dict, tensors: dict[str, Tensor], target, name: str) -> Mtp:
    """A drafter from a parsed config and its tensors, refused unless every one of them fits the target.

    A config without `mtp` is MiMo's own: hidden state first.
    """
    shape = read_shape(config, name)
    check_fit(config, shape, target, name)
    try:
        how = MtpForward(**config.get("mtp", {"hidden_first": True}))
    except TypeError as error:
        raise ValueError(f"{name}: config.json's mtp field does not fit: {error}") from None
    how = MtpForward(**asdict(how) | {"qkv_bias": f"{PREFIX}.0.self_attn.q_proj.bias" in tensors})
    drafter = Mtp(
        shape,
        target.config.layers,
        DraftVocab(target.config.vocab, read_ids(tensors)),
        target.embed.weight,
        target.head.weight,
        heads=len({key.split(".")[2] for key in tensors if key.startswith(PREFIX)}),
        forward=how,
    )
    fill(parameters(drafter), tensors, name, "an MTP head", aside=("draft_ids",))
    return drafter


def save(drafter: Mtp, folder: Path, target=None) -> None:
    tensors = rows_of(parameters(drafter))
    if drafter.vocab.ids is not None:
        tensors["draft_ids"] = drafter.vocab.ids
    config = {
        "architectures": ["MtpDrafter"],
        **shape_fields(drafter.shape),
        "num_nextn_predict_layers": len(drafter.blocks),
        "vocab_size": drafter.vocab.target_size,
        "mtp": asdict(drafter.how),
        "dtype": dtype_name(drafter.blocks[0].project.weight),
    }
    write_folder(folder, config, tensors)
