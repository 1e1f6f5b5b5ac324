"""The EAGLE-1/2 layout, as its authors publish it: `layers.0.*` without an input norm, `fc` over [embedding, feature].

Traps: `fc` has a bias unless the config says `"bias": false`. There is no norm before the target's head. The file may
hold a copy of the target's embedding, which is not read. A config without `rope_theta` means 10000. `draft_ids`, which
target token each row of the draft vocabulary is, is ours, for heads trained on a part of the vocabulary.
"""

from pathlib import Path

from torch import Tensor

from drafters.eagle import Eagle
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
from drafters.vocab import DraftVocab
from specdec.checkpoint import whole, write_folder


def parameters(drafter: Eagle) -> dict[str, tuple[Tensor, int, int]]:
    return whole(drafter.fc, "fc") | layer_parameters(drafter, "layers.0")


def build(config: dict, tensors: dict[str, Tensor], target, name: str) -> Eagle:
    """A drafter from a parsed config and its tensors, refused unless every one of them fits the target."""
    shape = read_shape(config, name)
    check_fit(config, shape, target, name)
    drafter = Eagle(
        shape,
        target.config.layers,
        DraftVocab(target.config.vocab, read_ids(tensors)),
        target.embed.weight,
        target.head.weight,
        fc_bias=config.get("bias", True),
        qkv_bias="layers.0.self_attn.q_proj.bias" in tensors,
    )
    fill(parameters(drafter), tensors, name, "EAGLE-1/2", aside=("embed_tokens.weight", "draft_ids"))
    return drafter


def save(drafter: Eagle, folder: Path, target=None) -> None:
    """Write the published layout, without embeddings."""
    tensors = rows_of(parameters(drafter))
    if drafter.vocab.ids is not None:
        tensors["draft_ids"] = drafter.vocab.ids
    config = {
        "architectures": ["LlamaForCausalLMEagle"],
        **shape_fields(drafter.shape),
        "vocab_size": drafter.vocab.target_size,
        "bias": drafter.fc.bias is not None,
        "dtype": dtype_name(drafter.fc.weight),
    }
    write_folder(folder, config, tensors)
