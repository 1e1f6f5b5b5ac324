"""The layout of vLLM's `speculators` library: what its kinds share, and EAGLE-3.

EAGLE-3 has layers.0.* for midlayer.*, and every other tensor its usual name. The draft layer's own config, with its
rope, is nested in `transformer_layer_config`. A field that is missing there has the default of its model class, not
ours: the library leaves out what equals it.

Traps: `eagle_aux_hidden_state_layer_ids` counts layers by their inputs, which are indices into hidden_states.
`norm_output` means post-norm feedback. `norm_before_residual` is false where absent, though its trainer's default is
true, and vLLM's too. With `attention_bias` the projection after the attention has a bias as well, in the library as in
vLLM; it is not trained, and a file without it would leave it undefined.
"""

import torch

from specdec.drafters.formats import eagle3, eagle3_layout
from specdec.drafters.formats.base import Layout, TargetFacts, Tensors
from specdec.drafters.formats.eagle3 import Eagle3Meaning
from specdec.drafters.formats.maps import NO_HEAD, with_membership
from specdec.drafters.formats.parts import dtype_name, renamed
from specdec.drafters.layers import shape_fields
from specdec.model.names import public_name

OUTPUT_BIAS = "midlayer.self_attn.o_proj.bias"
SPECULATIVE_TOKENS = 3  # a default for the server, which users override; the library's converter states the same


def kind_of(config: dict) -> str | None:
    """Return the drafter's kind in the speculators library, or None for other configs."""
    return config.get("speculators_model_type")


def nested_config(config: dict, name: str) -> dict:
    """`transformer_layer_config` with the defaults of its model class filled in, as flat fields."""
    from transformers import AutoConfig

    nested = config.get("transformer_layer_config")
    if not isinstance(nested, dict):
        raise ValueError(f"{name}: a speculators config needs the object transformer_layer_config")
    fields = {key: value for key, value in nested.items() if key != "model_type"}
    kind = nested.get("model_type", "qwen3" if kind_of(config) == "eagle3" else "llama")
    try:
        return AutoConfig.for_model(kind, **fields).to_dict()
    except Exception as error:  # transformers' checks of fields raise errors of their own types
        reason = " ".join(str(error).split())
        raise ValueError(f"{name}: transformer_layer_config is not one of transformers': {reason}") from None


def speculators_fields(
    algorithm: str, architecture: str, target: TargetFacts | None, tokens: int = SPECULATIVE_TOKENS
) -> dict:
    """Return the fields that the library and vLLM need in addition to the layer's."""
    return {
        "architectures": [architecture],
        "speculators_model_type": algorithm,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": algorithm,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
            "default_proposal_method": "greedy",
            "verifier": {
                "name_or_path": public_name(target.name) if target else None,
                "architectures": list(target.architectures) if target else [],
            },
        },
    }


# EAGLE-3


def read(config: dict, tensors: Tensors, name: str) -> tuple[Eagle3Meaning, Tensors]:
    """Read an EAGLE-3 head of the speculators library. Raise ValueError for more than one layer."""
    if "layers.1.self_attn.q_proj.weight" in tensors:
        raise ValueError(f"{name}: the drafter has more than one layer, which is not supported for EAGLE-3")
    layer = nested_config(config, name)
    tensors = renamed(tensors, "layers.0.", "midlayer.")
    if OUTPUT_BIAS in tensors and (tensors[OUTPUT_BIAS].is_meta or not tensors[OUTPUT_BIAS].any()):
        tensors = {key: tensor for key, tensor in tensors.items() if key != OUTPUT_BIAS}
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    # `norm_output_means` is ours: a head exported by other hands may say the other thing with the same field.
    feedback = config.get("norm_output_means", "feedback") == "feedback" and config.get("norm_output", False)
    flags = {key: value for key, value in config.items() if key.startswith(("norm_", "fc_norm", "target_", "draft_"))}
    taps = eagle3_layout.check_list(ids, name) if ids else None
    return eagle3_layout.meaning_of(layer | flags, tensors, name, taps, bool(feedback), True), tensors


def write(meaning: Eagle3Meaning, tensors: Tensors, target: TargetFacts | None) -> tuple[dict, Tensors]:
    """Write an EAGLE-3 head. Raise ValueError if it reads the hidden state after the final norm."""
    if target is not None and target.layers in (meaning.taps or ()):
        raise ValueError(
            f"the drafter reads hidden state {target.layers}, after the final norm, for which this layout has no name "
            "(train with lower drafter.taps)"
        )
    return spell(meaning, tensors, target)


def spell(meaning: Eagle3Meaning, tensors: Tensors, target: TargetFacts | None) -> tuple[dict, Tensors]:
    """`write`, whatever hidden states the taps are."""
    meaning, tensors = eagle3.ascending(meaning, tensors)
    how = meaning.forward
    if not how.head_norm:
        raise ValueError(
            "the drafter's head sees no final norm, which the speculators layout cannot say (train with "
            "drafter.head_norm=true)"
        )
    if not meaning.own_head:
        raise ValueError(NO_HEAD)
    if meaning.draft_vocab == meaning.vocab and "d2t" in tensors and not tensors["d2t"].any():
        # vLLM has no place for a map of all tokens to themselves.
        tensors = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    layer = shape_fields(meaning.shape) | {"vocab_size": meaning.vocab, "attention_bias": how.qkv_bias}
    if how.qk_norm:
        layer["model_type"] = "qwen3"
    elif how.qkv_bias:  # vLLM's Qwen3 layer has none after the attention
        tensors = tensors | {OUTPUT_BIAS: torch.zeros_like(tensors["midlayer.post_attention_layernorm.weight"])}
    if meaning.taps and len(meaning.taps) != 3:
        layer["num_aux_hidden_states"] = len(meaning.taps)  # where vLLM looks; it takes three otherwise
    flags = {
        "norm_before_residual": how.residual_norm,
        "norm_before_fc": how.input_norm,
        "fc_norm": how.tap_norms,
        "norm_output": how.feedback == "post",
    }
    config = speculators_fields("eagle3", "Eagle3Speculator", target) | flags
    config |= {
        "draft_vocab_size": meaning.draft_vocab,
        "target_hidden_size": meaning.tap_width if meaning.tap_width != meaning.shape.hidden else None,
        "eagle_aux_hidden_state_layer_ids": list(meaning.taps) if meaning.taps else None,
        "dtype": dtype_name(tensors["fc.weight"]),
        "transformer_layer_config": layer,
    }
    return config, with_membership(renamed(tensors, "midlayer.", "layers.0."), meaning.vocab)


def doubts(config: dict) -> list[str]:
    """What vLLM would read otherwise than `read`."""
    out = eagle3_layout.order_doubts(config.get(eagle3_layout.LAYER_IDS))
    if "norm_before_residual" not in config:
        out.append("norm_before_residual is absent: false as in speculators, but true in vLLM")
    return out


EAGLE3 = Layout(
    "speculators",
    "EAGLE-3 as of speculators and vLLM",
    lambda config, tensors: kind_of(config) == "eagle3" and any(name.startswith("layers.0.") for name in tensors),
    read,
    write,
    names_layers=True,
    doubts=doubts,
)
