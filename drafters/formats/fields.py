"""The config fields of a draft layer's shape: read, written and described."""

from torch import Tensor

from specdec.drafters.layers import DraftShape
from specdec.model.archs import read_rope, rope_fields
from specdec.model.config_fields import DIAGNOSED, check_config, head_shape
from specdec.model.rope import Rope


def read_shape(config: dict, name: str) -> DraftShape:
    """The shape that a Hugging Face config of the Llama kind states. Raises ValueError if we cannot run it.

    `num_hidden_layers` and `architectures` are not read, because published heads of one layer claim up to 40 layers,
    and to be whole models.
    """
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{name}: activation {config['hidden_act']!r} is not supported; supported is 'silu'")
    check_config(config, f"{name}: config.json", any_range=DIAGNOSED)
    try:
        return DraftShape(
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            **head_shape(config),
            eps=config.get("rms_norm_eps", 1e-6),
            rope=read_rope(config),
            context=config.get("max_position_embeddings", 2048),
        )
    except KeyError as error:
        raise ValueError(f"{name}: config.json lacks the field {error}") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: a field of config.json has a value that cannot be: {error}") from None


def shape_fields(shape: DraftShape) -> dict:
    """The config fields that `read_shape` reads back."""
    return {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.eps,
        "max_position_embeddings": shape.context,
        "tie_word_embeddings": False,
        **rope_fields(shape.rope),
    }


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def describe_shape(shape: DraftShape) -> dict[str, str]:
    """The shape of a draft layer, in words."""
    grouped = f", {shape.kv_heads} for keys and values" if shape.kv_heads != shape.heads else ""
    return {
        "layer": f"hidden {shape.hidden}, MLP {shape.intermediate}, {shape.heads} heads of {shape.head_dim}{grouped}",
        "rope": describe_rope(shape.rope),
        "context": f"{shape.context} positions",
        "rms_norm_eps": f"{shape.eps:g}",
    }


def describe_rope(rope: Rope) -> str:
    scaling = "" if rope.scaling == "default" else f", {rope.scaling} scaling by {rope.factor:g}"
    return f"theta {rope.theta:g}{scaling}"


def shape_faults(shape: DraftShape) -> list[str]:
    """The numbers of a shape with which nothing can be computed."""
    out = [shape.rope.fault()]
    if not 0 <= shape.eps < 1:
        out.append(f"rms_norm_eps is {shape.eps:g}, and must be from 0 to 1")
    if shape.context < 1:
        out.append(f"max_position_embeddings is {shape.context}, and must be at least 1")
    return [fault for fault in out if fault]
