"""What a decoder of the Llama kind is made of, and the fields that all families read alike."""

from dataclasses import dataclass

from specdec.layers import Rope, check_heads


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder. `context` is the longest sequence for which the forward is exact."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float
    rope: Rope
    context: int
    tied: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


def read_common(config: dict, **differences) -> ModelConfig:
    """The fields that mean the same in every supported family; `differences` are the family's own."""
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(f"activation {activation!r} is not supported; supported is 'silu'")
    heads = config["num_attention_heads"]
    fields = {
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "intermediate": config["intermediate_size"],
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "vocab": config["vocab_size"],
        "eps": config.get("rms_norm_eps", 1e-6),
        "rope": read_rope(config),
        "context": config.get("max_position_embeddings", 2048),
        "tied": config.get("tie_word_embeddings", False),
    }
    check_heads(fields["heads"], fields["kv_heads"])
    return ModelConfig(**(fields | differences))


def read_rope(config: dict) -> Rope:
    """Both spellings: `rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling`."""
    fields = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = fields.get("rope_type", fields.get("type", "default"))
    theta = float(fields.get("rope_theta", config.get("rope_theta", 10000.0)))
    if config.get("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError("partial rotary embedding (partial_rotary_factor) is not supported")
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, "linear", factor=float(fields["factor"]))
    if kind == "llama3":
        return Rope(
            theta,
            "llama3",
            factor=float(fields["factor"]),
            low_freq_factor=float(fields["low_freq_factor"]),
            high_freq_factor=float(fields["high_freq_factor"]),
            original_context=int(fields["original_max_position_embeddings"]),
        )
    raise ValueError(f"rope type {kind!r} is not supported; supported are default, linear, llama3")


def rope_fields(rope: Rope) -> dict:
    """The config fields that `read_rope` reads back as `rope`, in the spelling that older readers know too."""
    fields: dict = {"rope_theta": rope.theta}
    if rope.scaling == "linear":
        fields["rope_scaling"] = {"rope_type": "linear", "factor": rope.factor}
    elif rope.scaling == "llama3":
        fields["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": rope.factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_context,
        }
    return fields


def context_without_sliding(config: dict, window: int | None) -> int:
    """Up to the window's length sliding attention equals full attention, so that is where our context ends."""
    context = config.get("max_position_embeddings", 2048)
    return min(context, window) if window else context
