"""The layout of EAGLE-3's authors, of SpecForge and of SGLang, and ours, which extends it.

Traps: the published configs state no rope, and mean theta 10000 whatever the target's is. Taps that are not listed are
hidden states 2, N/2, N-3; a list of them means different things in different places (`_taps`). `norm_output` switches
the norm before the head off in SpecForge, and the post-norm feedback on in speculators, vLLM and TorchSpec. Here it is
SpecForge's, unless the field `norm_output_means`, ours, says 'feedback'.

ModelOpt (NVIDIA) has the same fields. While it trains, everything is under `eagle_module.`, among other weights or
alone. The norms of the two inputs are next to the layer (`input_embeds_norm`, `hidden_norm`) or inside it, by version.
The head is `eagle_lm_head`. Exported, the prefix is gone, the layer is layers.0.*, and there is no t2d. Older versions
export the published layout. Traps: layer ids count outputs, as in SpecForge. A file without a head means the target's,
one without d2t the whole vocabulary. q, k and v have biases if the config says so, which the tensors show.
"""

import dataclasses
from typing import Any

from specdec.drafters.eagle3 import Eagle3Forward
from specdec.drafters.formats.base import Layout, TargetFacts, Tensors
from specdec.drafters.formats.eagle3 import PROJECTIONS, Eagle3Meaning, ascending
from specdec.drafters.formats.maps import NO_HEAD, with_membership
from specdec.drafters.formats.parts import dtype_name, number, read_shape, renamed
from specdec.drafters.layers import shape_fields

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
PREFIX = "eagle_module."
TRAINING_NAMES = {
    "input_embeds_norm.weight": "midlayer.input_layernorm.weight",
    "hidden_norm.weight": "midlayer.hidden_norm.weight",
    "eagle_lm_head.weight": "lm_head.weight",
}


def recognise(config: dict, tensors: Tensors) -> bool:
    """Return whether the tensors have the published names of an EAGLE-3 head."""
    return "fc.weight" in tensors and any(name.startswith("midlayer.") for name in tensors)


def read(config: dict, tensors: Tensors, name: str) -> tuple[Eagle3Meaning, Tensors]:
    """What a checkpoint in the published layout means, and its tensors."""
    reading = config.get("norm_output_means", "head")
    if reading not in ("head", "feedback"):
        raise ValueError(f"{name}: norm_output_means must be 'head' or 'feedback', got {reading!r}")
    feedback = reading == "feedback" and config.get("norm_output", False)
    head_norm = config.get("norm_output", True) if reading == "head" else True
    return meaning_of(config, tensors, name, _taps(config, name), bool(feedback), bool(head_norm)), tensors


def meaning_of(
    config: dict, tensors: Tensors, name: str, taps: tuple[int, ...] | None, feedback: bool, head_norm: bool
) -> Eagle3Meaning:
    """Return the meaning by the fields on which all layouts agree.

    Properties that the tensors determine are read from the tensors, not from the config.
    """
    shape = read_shape(config, name)
    if "fc.weight" not in tensors:
        raise ValueError(f"{name}: the checkpoint lacks the tensor fc.weight")
    for needed, stated in (("fc_norm.0.weight", "fc_norm"), ("input_norm.weight", "norm_before_fc")):
        if stated in config and bool(config[stated]) != (needed in tensors):
            there = "holds" if needed in tensors else "lacks"
            raise ValueError(f"{name}: the config sets {stated} to {config[stated]}, but the file {there} {needed}")
    width, vocab = config.get("target_hidden_size") or shape.hidden, number(config, "vocab_size", name)
    rows = next((len(tensors[key]) for key in ("d2t", "lm_head.weight") if key in tensors), vocab)
    return Eagle3Meaning(
        shape=shape,
        vocab=vocab,
        draft_vocab=config.get("draft_vocab_size") or rows,
        taps=taps,
        tap_width=width,
        forward=Eagle3Forward(
            tap_norms="fc_norm.0.weight" in tensors,
            input_norm="input_norm.weight" in tensors,
            residual_norm=bool(config.get("norm_before_residual", False)),
            feedback="post" if feedback else "pre",
            head_norm=head_norm,
            qkv_bias=f"{PROJECTIONS[0]}.bias" in tensors,
            qk_norm="midlayer.self_attn.q_norm.weight" in tensors,
        ),
        own_head="lm_head.weight" in tensors
        or (config.get("draft_vocab_size") is not None and not config.get("target_head")),
    )


def _taps(config: dict, name: str) -> tuple[int, ...] | None:
    """Return the taps as indices into hidden_states, or None for the published default.

    A list inside `eagle_config` counts layers by their outputs (SpecForge, SGLang, ModelOpt). A list at the top of the
    config counts layers by their inputs (vLLM, which reads the list inside as inputs too if there is no other). Our own
    field `taps` holds the indices.
    """
    if config.get("taps") is not None:
        return check_list(config["taps"], name)
    if outputs := (config.get("eagle_config") or {}).get(LAYER_IDS):
        return tuple(i + 1 for i in check_list(outputs, name))
    inputs = config.get(LAYER_IDS)
    return check_list(inputs, name) if inputs else None


def check_list(taps, name: str) -> tuple[int, ...]:
    """Return a config's list of taps as a tuple. Raise ValueError unless it is a list of integers."""
    if not isinstance(taps, list) or not all(isinstance(tap, int) for tap in taps):
        raise ValueError(f"{name}: taps must be a list of layer numbers, got {taps!r}")
    return tuple(taps)


def write(meaning: Eagle3Meaning, tensors: Tensors, target: TargetFacts | None) -> tuple[dict, Tensors]:
    """The published layout, as SpecForge and SGLang read it."""
    if not meaning.own_head and meaning.draft_vocab != meaning.vocab:
        raise ValueError(NO_HEAD)
    return _written(*ascending(meaning, tensors), target)


def _written(meaning: Eagle3Meaning, tensors: Tensors, target: TargetFacts | None) -> tuple[dict, Tensors]:
    how = meaning.forward
    flags = {"fc_norm": how.tap_norms, "norm_before_fc": how.input_norm, "attention_bias": how.qkv_bias}
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **shape_fields(meaning.shape),
        "vocab_size": meaning.vocab,
        "draft_vocab_size": meaning.draft_vocab if meaning.own_head else None,
        "dtype": dtype_name(tensors["fc.weight"]),
        "norm_before_residual": how.residual_norm,  # some readers take a missing field for true
        **{name: True for name, on in flags.items() if on},
        **listed(meaning.taps, target),
    }
    if how.feedback == "post":
        config |= {"norm_output": True, "norm_output_means": "feedback"}
    elif not how.head_norm:
        config |= {"norm_output": False, "norm_output_means": "head"}
    if meaning.tap_width != meaning.shape.hidden:
        config["target_hidden_size"] = meaning.tap_width
    return config, with_membership(tensors, meaning.vocab)


def listed(taps: tuple[int, ...] | None, target: TargetFacts | None) -> dict:
    """Return the config fields that list the taps, or {} for the published default.

    The taps are listed as layer outputs where SGLang, SpecForge and ModelOpt look, and as layer inputs where vLLM looks
    first. Raises ValueError for a tap that is no layer's output.
    """
    if taps is None:
        return {}
    for tap, state in ((0, "the embeddings"), (target.layers if target else -1, "the state after the final norm")):
        if tap in taps:
            raise ValueError(
                f"the drafter reads {state} (hidden state {tap}), for which this layout has no name (train with "
                "drafter.taps from 1 to the number of layers less 1)"
            )
    return {LAYER_IDS: list(taps), "eagle_config": {LAYER_IDS: [tap - 1 for tap in taps]}}


def write_own(meaning: Eagle3Meaning, tensors: Tensors, target: TargetFacts | None) -> tuple[dict, Tensors]:
    """Write the published layout with our field `taps`, and the lists for other readers if these can name the taps.

    The field `target_head` means that the drafter uses the target's rows for the draft vocabulary, and the file holds
    no head.
    """
    config, tensors = _written(dataclasses.replace(meaning, taps=None), tensors, target)
    if not meaning.own_head and meaning.draft_vocab != meaning.vocab:
        config |= {"draft_vocab_size": meaning.draft_vocab, "target_head": True}
    config["taps"] = list(meaning.taps) if meaning.taps else None
    in_order = list(meaning.taps or ()) == sorted(set(meaning.taps or ()))  # other readers would put them in order
    if meaning.taps and in_order and target is not None and all(0 < tap < target.layers for tap in meaning.taps):
        config |= listed(meaning.taps, target)
    return config, tensors


def doubts(config: dict) -> list[str]:
    """What vLLM or SGLang would read otherwise than `read`."""
    out = order_doubts(config.get("taps") or (config.get("eagle_config") or config).get(LAYER_IDS))
    if "norm_output" in config and "norm_output_means" not in config:
        out.append("norm_output is read as SpecForge's, the norm before the head; in vLLM it means post-norm feedback")
    return out


def order_doubts(ids: list | None) -> list[str]:
    """Return a warning if the taps are not listed in ascending order, the order in which servers gather them."""
    if not isinstance(ids, list) or ids == sorted(set(ids)):
        return []
    return [f"the taps are read in the order listed, {ids}; vLLM and SGLang gather them in ascending order"]


# ModelOpt


def read_training(config: dict, tensors: Tensors, name: str) -> tuple[Eagle3Meaning, Tensors]:
    """Read an EAGLE-3 head from a ModelOpt training checkpoint, ignoring the tensors of the target."""
    ours = {key.removeprefix(PREFIX): value for key, value in tensors.items() if key.startswith(PREFIX)}
    return read_modelopt(config, {TRAINING_NAMES.get(key, key): value for key, value in ours.items()}, name)


def read_modelopt(config: dict, tensors: Tensors, name: str) -> tuple[Eagle3Meaning, Tensors]:
    """Read an EAGLE-3 head that ModelOpt exported. A file without `lm_head.weight` uses the target's head."""
    meaning, tensors = read(config, renamed(tensors, "layers.0.", "midlayer."), name)
    return dataclasses.replace(meaning, own_head="lm_head.weight" in tensors), tensors


def write_training(meaning: Eagle3Meaning, tensors: Tensors, target: TargetFacts | None) -> tuple[dict, Tensors]:
    """Write an EAGLE-3 head under the names of a ModelOpt training checkpoint."""
    config, tensors = write_modelopt(meaning, tensors, target)
    back = {new.replace("midlayer.", "layers.0."): old for old, new in TRAINING_NAMES.items()}
    return config, {PREFIX + back.get(key, key): value for key, value in tensors.items()}


def write_modelopt(meaning: Eagle3Meaning, tensors: Tensors, target: TargetFacts | None) -> tuple[dict, Tensors]:
    """Write an EAGLE-3 head as ModelOpt exports it, without the mask `t2d`."""
    config, tensors = write(dataclasses.replace(meaning, own_head=True), tensors, target)
    return config, renamed({key: t for key, t in tensors.items() if key != "t2d"}, "midlayer.", "layers.0.")


OWN = Layout(
    "specdec",
    "ours: the EAGLE-3 layout, with taps by name",
    lambda config, tensors: recognise(config, tensors) and "taps" in config,
    read,
    write_own,
    shares_head=True,
)
PUBLISHED = Layout(
    "eagle3", "EAGLE-3 as of EAGLE, SpecForge and SGLang", recognise, read, write, names_layers=True, doubts=doubts
)
SHARED: dict[str, Any] = {"shares_head": True, "names_layers": True, "doubts": doubts}
MODELOPT = Layout(
    "modelopt",
    "EAGLE-3 as ModelOpt exports it",
    lambda config, tensors: "layers.0.hidden_norm.weight" in tensors and config.get("speculators_model_type") is None,
    read_modelopt,
    write_modelopt,
    **SHARED,
)
MODELOPT_TRAINING = Layout(
    "modelopt-training",
    "EAGLE-3 as ModelOpt trains it",
    lambda config, tensors: any(name.startswith(PREFIX) for name in tensors),
    read_training,
    write_training,
    **SHARED,
)
