"""What a decoder of the Llama kind is made of, and the config fields that all families read alike."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specdec.model.config_fields import head_shape
from specdec.model.layers import check_heads
from specdec.model.rope import Rope


class NotNative(ValueError):
    """Our decoder does not have a part of this model. transformers' own modules may have it."""


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float
    rope: Rope
    context: int  # the longest sequence for which the forward is exact
    tied: bool  # the head is the embedding
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_offset: bool = False  # norms store their weight less 1
    sandwich_norms: bool = False  # norms after attention and MLP too
    activation: str = "silu"  # one of ops.gated.ACTIVATIONS
    attention_scale: float | None = None  # factor of q times k; None: head_dim ** -0.5
    embed_scale: float | None = None  # factor of the embeddings; None: 1
    logit_softcap: float | None = None  # c: logits become c tanh(logits / c); None: no cap
    sliding: tuple[bool, ...] = ()  # for each layer: does it see the last `window` positions only? Empty: none does
    window: int | None = None  # the position itself included
    local_rope: Rope | None = None  # of the sliding layers; None: `rope`

    def __post_init__(self) -> None:
        """Raise ValueError for a rope that is no rotation."""
        for rope in filter(None, (self.rope, self.local_rope)):
            if fault := rope.fault():
                raise ValueError(fault)


@dataclass(frozen=True)
class Architecture:
    """A model family: how its config is read, and what its files hold besides the text model."""

    read: Callable[[dict], ModelConfig]
    set_aside: Callable[[str], bool] = lambda name: False  # does a tensor belong to a part that is no text model?


# By kind of scaling the attributes of a Rope, and the config's fields for them
SCALING: dict[str, dict[str, str]] = {"default": {}, "linear": {"factor": "factor"}}
SCALING["llama3"] = {name: name for name in ("factor", "low_freq_factor", "high_freq_factor")}
SCALING["llama3"]["original_context"] = "original_max_position_embeddings"

ACTIVATION_NAMES = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def read_common(config: dict, **differences) -> ModelConfig:
    """Return a ModelConfig from the fields that mean the same in every family; `differences` are the family's own."""
    activation = config.get("hidden_act", "silu")
    if activation not in ACTIVATION_NAMES:
        raise NotNative(f"activation {activation!r} is not native")
    fields: dict[str, Any] = {
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "intermediate": config["intermediate_size"],
        **head_shape(config, **{key: differences[key] for key in ("head_dim",) if key in differences}),
        "vocab": config["vocab_size"],
        "eps": config.get("rms_norm_eps", 1e-6),
        "rope": read_rope(config),
        "context": config.get("max_position_embeddings", 2048),
        "tied": config.get("tie_word_embeddings", False),
        "activation": ACTIVATION_NAMES[activation],
    }
    fields |= differences
    check_heads(fields["heads"], fields["kv_heads"])
    return ModelConfig(**fields)


def read_sliding(config: dict, default: list[str]) -> dict:
    """Return the fields of ModelConfig for sliding layers. `default`: layer types if the config names none."""
    window = config.get("sliding_window")
    types = config.get("layer_types") or default
    if unknown := set(types) - {"full_attention", "sliding_attention"}:
        raise ValueError(f"layer type {min(unknown)!r} is not supported; supported are full and sliding attention")
    if len(types) != config["num_hidden_layers"]:
        raise ValueError(f"layer_types names {len(types)} layers, num_hidden_layers is {config['num_hidden_layers']}")
    if "sliding_attention" not in types:
        return {}
    if window is None:
        raise ValueError("layer_types names sliding layers, but sliding_window is null")
    return {"sliding": tuple(kind == "sliding_attention" for kind in types), "window": window}


def read_rope(config: dict) -> Rope:
    """Return the rope of a config, from `rope_parameters` (transformers 5) or from `rope_theta` and `rope_scaling`.

    If both are there, `rope_scaling` wins, as in transformers. Raises NotNative for a rope that we do not build.
    """
    fields = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    if any(isinstance(value, dict) for value in fields.values()):
        raise NotNative("a rope for each type of layer is not native")
    kind = fields.get("rope_type", fields.get("type", "default"))
    theta = float(fields.get("rope_theta", config.get("rope_theta", 10000.0)))
    if config.get("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0)) != 1.0:
        raise NotNative("partial rotary embedding is not native")
    if kind not in SCALING:
        raise NotNative(f"rope type {kind!r} is not native")
    how = {own: type(getattr(Rope, own))(fields[field]) for own, field in SCALING[kind].items()}
    return Rope(theta, kind, **how)


def rope_fields(rope: Rope) -> dict:
    """Return the config fields of `rope` in the older spelling, which all readers know; `read_rope` reads them back."""
    scaling = {field: getattr(rope, own) for own, field in SCALING[rope.scaling].items()}
    return {"rope_theta": rope.theta} | ({"rope_scaling": {"rope_type": rope.scaling, **scaling}} if scaling else {})
