"""The fields of config.json that any reader uses: their types, and the ranges that models can have.

The largest published models are below a tenth of each upper bound. A larger value is a mistake; without the check it
would be allocated first.
"""

import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.model.weight_files import read_json
from specdec.schema import check, ranged, shown

MOST_TOKENS = 1 << 24
MOST_WIDTH = 1 << 17
NO_NULL: Any = None  # default of a field that a file may leave out, but not set to null


@dataclass
class RopeFields:
    """Fields of `rope_scaling` and `rope_parameters`."""

    rope_type: str = "default"
    type: str = "default"
    rope_theta: float = ranged(0, 1e12, 1e4, above=True)
    factor: float | None = ranged(0, 1e6, 1.0, above=True)
    low_freq_factor: float = ranged(0, 1e6, 1.0, above=True)
    high_freq_factor: float = ranged(0, 1e6, 4.0, above=True)
    original_max_position_embeddings: float = ranged(1, 1 << 31, 8192)
    partial_rotary_factor: float = ranged(0, 1, 1.0, above=True)


@dataclass
class ConfigFields:
    """Fields of config.json of a target or of a drafter, whatever its family. No file has all of them."""

    model_type: str | None = None
    architectures: list[str] | None = None
    hidden_size: int = ranged(1, MOST_WIDTH, 64)
    intermediate_size: int = ranged(1, 1 << 20, 128)
    num_hidden_layers: int = ranged(1, 1024, 2)
    num_attention_heads: int = ranged(1, 4096, 4)
    num_key_value_heads: int | None = ranged(1, 4096, None)
    head_dim: int | None = ranged(2, 4096, None)
    vocab_size: int = ranged(1, MOST_TOKENS, 4096)
    max_position_embeddings: int = ranged(1, 1 << 31, 2048)
    rms_norm_eps: float = ranged(0, 1, 1e-6)
    rope_theta: float = ranged(0, 1e12, 1e4, above=True)
    rope_local_base_freq: float = ranged(0, 1e12, 1e4, above=True)
    rope_scaling: dict | None = None
    rope_parameters: dict | None = None
    partial_rotary_factor: float = ranged(0, 1, 1.0, above=True)
    hidden_act: str | None = None
    hidden_activation: str | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = ranged(0, 1 << 31, None)
    sliding_window_pattern: int = ranged(1, 1024, 6)
    max_window_layers: int | None = ranged(0, 1024, None)
    layer_types: list[str] | None = None
    query_pre_attn_scalar: float = ranged(0, 1e6, 256, above=True)
    final_logit_softcapping: float | None = ranged(0, 1e6, None, above=True)
    attn_logit_softcapping: float | None = ranged(0, 1e6, None, above=True)
    eos_token_id: int | list[int] | None = ranged(0, MOST_TOKENS, None)
    dtype: str | dict | None = None
    torch_dtype: str | None = None
    quantization_config: dict | None = None
    text_config: dict | None = None
    # Of drafters
    draft_vocab_size: int | None = ranged(1, MOST_TOKENS, None)
    target_hidden_size: int | None = ranged(1, MOST_WIDTH, None)
    num_nextn_predict_layers: int | None = ranged(0, 64, None)
    num_experts_per_tok: int | None = ranged(1, 1024, None)
    n_group: int | None = ranged(1, 1024, None)
    topk_group: int | None = ranged(1, 1024, None)
    routed_scaling_factor: float | None = ranged(0, 1e6, None, above=True)
    norm_topk_prob: bool = True
    bias: bool = True
    own_embedding: bool = False
    fusion_bias: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    taps: list[int] | None = ranged(0, 1024, None)
    eagle_aux_hidden_state_layer_ids: list[int] | None = ranged(-1, 1024, None)
    eagle_config: dict | None = None
    mtp: dict = NO_NULL
    recipe: dict = NO_NULL
    speculators_model_type: str | None = None
    transformer_layer_config: dict | None = None


# Numbers with which a checkpoint can be opened but not computed with: `specdec checkpoint` reports them, and
# tries others (`specdec.drafters.formats.base.shape_faults`).
DIAGNOSED = (
    "rope_theta",
    "factor",
    "rms_norm_eps",
    "max_position_embeddings",
    "taps",
    "eagle_aux_hidden_state_layer_ids",
)


def check_config(config: dict, where: str, native: bool = True, any_range: Collection[str] = ()) -> None:
    """Raise ValueError, with the field's name, for a value that no model has.

    Args:
        config: Parsed config.json.
        where: Its file, for errors.
        native: False for a family that only transformers knows. Its fields may be null, texts, or lists with an entry
            per layer: only its numbers are checked.
        any_range: Fields of which only the type is checked, such as `DIAGNOSED`.
    """
    read = config if native else {k: v for k, v in config.items() if isinstance(v, int | float) or k == "model_type"}
    check(ConfigFields, read, where, any_range)
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(config.get(name), dict) and native:
            _check_rope(config[name], f"{where}: {name}", any_range)
    for name in ("text_config", "transformer_layer_config"):
        if isinstance(config.get(name), dict):
            check_config(config[name], f"{where}: {name}", native, any_range)
    check(ConfigFields, read.get("eagle_config") or {}, f"{where}: eagle_config", any_range)


def _check_rope(rope: dict, where: str, any_range: Collection[str]) -> None:
    check(RopeFields, rope, where, any_range)
    for name, inner in rope.items():
        if isinstance(inner, dict):
            check(RopeFields, inner, f"{where}: {name}", any_range)
    low, high = rope.get("low_freq_factor"), rope.get("high_freq_factor")
    if low is not None and high is not None and low >= high:
        raise ValueError(f"{where}: high_freq_factor must be above low_freq_factor, got {high} and {low}")


def head_shape(config: dict, **differences: Any) -> dict[str, int]:
    """Return `heads`, `kv_heads` and `head_dim` of a checked config.

    Raises ValueError for heads that do not divide, and KeyError for a field that is missing.
    """
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    found = {
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or hidden // heads,
    } | differences
    if found["head_dim"] is None or found["head_dim"] < 2 or found["head_dim"] % 2:
        raise ValueError(
            f"head_dim must be an even number of at least 2, got {shown(found['head_dim'])} (hidden_size {hidden}, "
            f"num_attention_heads {heads})"
        )
    return found


# generation_config.json: EOS tokens, which decoding uses, and fields that it ignores

# What transformers' `generate` obeys and we leave out: name -> the value that does nothing
GENERATION = {
    "repetition_penalty": 1, "encoder_repetition_penalty": 1, "no_repeat_ngram_size": 0, "min_length": 0,
    "encoder_no_repeat_ngram_size": 0, "min_new_tokens": 0, "max_new_tokens": None, "max_length": 20, "num_beams": 1,
    "suppress_tokens": None, "begin_suppress_tokens": None, "bad_words_ids": None, "sequence_bias": None,
    "forced_bos_token_id": None, "forced_eos_token_id": None, "forced_decoder_ids": None, "penalty_alpha": None,
    "exponential_decay_length_penalty": None, "guidance_scale": 1, "stop_strings": None, "watermarking_config": None,
    "max_time": None, "do_sample": False,
}  # fmt: skip
DRAWN = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")  # if it samples


def note_generation(folder: Path, name: str) -> None:
    """Print one line on standard error that names the fields of generation_config.json that decoding ignores."""
    file = folder / "generation_config.json"
    stated = read_json(file) if file.exists() else {}
    left = {key: stated[key] for key, neutral in GENERATION.items() if stated.get(key) not in (None, [], {}, neutral)}
    if stated.get("do_sample"):
        left |= {key: stated[key] for key in DRAWN if stated.get(key) is not None}
    if left:
        named = ", ".join(f"{key}={shown(value)}" for key, value in left.items())
        print(f"note: generation_config.json of {name} is not applied: {named}; give the sampling yourself",
              file=sys.stderr)  # fmt: skip


def read_eos(folder: Path, config: dict) -> frozenset[int]:
    """Return the end-of-sequence ids, from generation_config.json if there is one, as transformers reads them."""
    generation = folder / "generation_config.json"
    stated = read_json(generation) if generation.exists() or generation.is_symlink() else {}
    check(ConfigFields, stated, str(generation))
    eos = stated.get("eos_token_id")
    return frozenset(ends_of(config) if eos is None else [eos] if isinstance(eos, int) else eos)


def ends_of(config: dict) -> list[int]:
    """Return `eos_token_id` of a config or of its `text_config` as a list; empty if there is none."""
    eos = config.get("eos_token_id")
    if eos is None:
        eos = (config.get("text_config") or {}).get("eos_token_id")
    return [eos] if isinstance(eos, int) else eos or []
