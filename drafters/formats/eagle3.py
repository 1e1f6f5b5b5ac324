"""The EAGLE-3 layout, as published by its authors and by SpecForge.

Tensors: midlayer.*, fc, norm, lm_head, d2t (target id minus draft id, ascending ids) and t2d (membership). The
embedding is always the target's, even if the file holds one: exporters have been seen to store a random one.

Traps: the published configs state no rope, and mean theta 10000 whatever the target's is. Taps that are not listed are
hidden states 2, N/2, N-3, and a list of them means different things in different places (`_taps`). Our own field `taps`
holds indices into hidden_states.
"""

from pathlib import Path

import torch
from torch import Tensor

from drafters.common import DraftShape
from drafters.eagle3 import Eagle3
from drafters.formats.fields import check_fit, dtype_name, fill, layer_parameters, read_shape, shape_fields
from drafters.vocab import DraftVocab
from specdec.checkpoint import whole, write_folder
from specdec.model import check_taps


def parameters(drafter: Eagle3) -> dict[str, tuple[Tensor, int, int]]:
    """Published tensor names -> where their rows lie in our modules."""
    return (
        whole(drafter.fc, "fc")
        | whole(drafter.norm, "norm")
        | whole(drafter.head, "lm_head")
        | whole(drafter.embed_norm, "midlayer.input_layernorm")  # the published name misleads: it normalises embeddings
        | whole(drafter.hidden_norm, "midlayer.hidden_norm")
        | layer_parameters(drafter, "midlayer")
    )


def build(config: dict, tensors: dict[str, Tensor], target, name: str) -> Eagle3:
    """A drafter from a parsed config and its tensors, refused unless every one of them fits the target."""
    for field in OTHER_FORWARDS:
        if config.get(field):
            raise ValueError(f"{name}: the drafter's config sets {field}, which is not supported")
    shape = read_shape(config, name)
    wanted = target.config
    check_fit(config, shape, target, name)
    taps = _taps(config, wanted.layers, name)
    streams, rest = divmod(tensors["fc.weight"].shape[-1], wanted.hidden)
    if rest or streams != len(taps):
        raise ValueError(
            f"{name}: fc.weight takes {tensors['fc.weight'].shape[-1]} features, {len(taps)} taps of the target give "
            f"{len(taps) * wanted.hidden}"
        )
    check_taps(taps, wanted.layers)
    drafter = Eagle3(shape, taps, _vocab(config, tensors, wanted.vocab, name), target.embed.weight)
    fill(parameters(drafter), tensors, name, "EAGLE-3", aside=("d2t", "t2d", "embed_tokens.weight"))
    return drafter


# Fields of other trainers that change the forward; false or absent means the published one.
OTHER_FORWARDS = ("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm")


def _taps(config: dict, layers: int, name: str) -> tuple[int, ...]:
    """Indices into hidden_states. A list inside `eagle_config` counts layers by their outputs (SpecForge, SGLang), one
    at the top of the config by their inputs (speculators, vLLM)."""
    outputs = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if "taps" in config:
        taps = config["taps"]
    elif outputs:
        taps = [i + 1 for i in outputs]
    else:
        taps = config.get("eagle_aux_hidden_state_layer_ids") or [2, layers // 2, layers - 3]
    if not isinstance(taps, list) or not all(isinstance(tap, int) for tap in taps):
        raise ValueError(f"{name}: taps must be a list of layer numbers, got {taps!r}")
    return tuple(taps)


def _vocab(config: dict, tensors: dict[str, Tensor], size: int, name: str) -> DraftVocab:
    """The map d2t, checked against t2d: offsets and absolute ids look alike and draft nothing when confused."""
    if "d2t" not in tensors:
        return DraftVocab(size)
    d2t = tensors["d2t"].long()
    ids = torch.arange(len(d2t)) + d2t
    if "t2d" in tensors and not torch.equal(tensors["t2d"].nonzero().squeeze(-1), ids):
        raise ValueError(f"{name}: d2t and t2d name different tokens; d2t must hold target id minus draft id")
    if len(d2t) != config.get("draft_vocab_size", len(d2t)):
        raise ValueError(f"{name}: d2t has {len(d2t)} entries, draft_vocab_size is {config['draft_vocab_size']}")
    return DraftVocab(size, ids)


def save(drafter: Eagle3, folder: Path, target=None) -> None:
    """Write the published layout. Embeddings do not go into the file; taps go into the config as `taps`, and, given the
    target, as `eagle_config` too, unless the state after the final norm is among them: others have no name for it."""
    shape, vocab = drafter.shape, drafter.vocab
    ids = torch.arange(vocab.size) if vocab.ids is None else vocab.ids.cpu()
    tensors = {name: t[start : start + rows] for name, (t, start, rows) in parameters(drafter).items()}
    if not torch.equal(ids, ids.sort().values):
        raise ValueError("the EAGLE-3 layout needs a draft vocabulary in ascending order of ids")
    tensors["d2t"] = ids - torch.arange(vocab.size)
    tensors["t2d"] = vocab.contains()
    write_folder(folder, _config(drafter, vocab, shape, target), tensors)


def _config(drafter: Eagle3, vocab: DraftVocab, shape: DraftShape, target) -> dict:
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **shape_fields(shape),
        "vocab_size": vocab.target_size,
        "draft_vocab_size": vocab.size,
        "dtype": dtype_name(drafter.fc.weight),
        "taps": list(drafter.taps),
    }
    layers = target.config.layers if target is not None else 0
    if all(0 < tap < layers for tap in drafter.taps):
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in drafter.taps]}
    return config
