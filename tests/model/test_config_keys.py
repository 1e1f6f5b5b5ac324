"""Every key of a family's config, changed in turn, gives what transformers makes of it, or is refused."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import NamedTuple

import pytest
import torch
from helpers import SMALL, save_hf
from test_archs import GEMMA3_TEXT, LLAMA3_ROPE, MIXED, OLDER_LLAMA3
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from specdec.model.loader import load_target

IDS = torch.arange(40)[None]  # more than every window here
# What transformers does not take, and what means the same as if it were left out: the logits have no part in it, or
# (head_dim of Qwen2) older versions took it so.
HARMLESS = {("pad_token_id", "True"), ("pad_token_id", "0.5"), ("return_dict", "False"), ("head_dim", "None")}
# A small model of each native family, in which as much as possible is not what the family takes by default.
FAMILIES = {
    "llama": {"attention_bias": True, "mlp_bias": True, "head_dim": 16},
    "mistral": {"sliding_window": 8, "head_dim": 16},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1, **MIXED},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 1, "head_dim": 16, **MIXED},
    "gemma3_text": GEMMA3_TEXT,
}
ROPES = [
    {"rope_type": "default", "rope_theta": 50.0},
    {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0},
    {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0},
    {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16},
    LLAMA3_ROPE,
    {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
    {"rope_theta": 77.0},
    {"full_attention": {"rope_type": "default", "rope_theta": 50.0}},
]
TYPES = [["full_attention"] * 3, ["sliding_attention"] * 3, ["full_attention", "sliding_attention", "full_attention"]]
# What a key is changed to, where more can be said than the type of its value does.
VALUES = {
    "rope_parameters": ROPES,
    "rope_scaling": [
        {"type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"type": "yarn", "factor": 4.0},
        OLDER_LLAMA3,
    ],
    "rope_theta": [50.0],
    "rope_local_base_freq": [50.0],
    "partial_rotary_factor": [0.5],
    "layer_types": [*TYPES, ["full_attention"], ["chunked_attention"] * 3, None],
    "sliding_window": [4, 200, None],
    "max_window_layers": [0, 2, 3],
    "sliding_window_pattern": [2, 3],
    "_sliding_window_pattern": [2, 3],
    "hidden_act": ["gelu", "relu", "gelu_pytorch_tanh", "swish", "none such"],
    "hidden_activation": ["gelu", "silu", "none such"],
    "attn_logit_softcapping": [1.0],
    "final_logit_softcapping": [2.0],
    "logit_scale": [0.5],
    "embedding_multiplier": [3.0],
    "head_dim": [8, 16, 32, None],
    "eos_token_id": [5, [5, 6], None],
    "model_type": list(FAMILIES),
    "architectures": [["MistralForCausalLM"], ["NoneSuch"], None],
    "dtype": ["float32", "bfloat16"],
    "quantization_config": [{"quant_method": "none such"}],
    "attention_chunk_size": [8],
    "no_rope_layers": [[1, 0, 1]],
    "num_kv_shared_layers": [1],
    "mup_enabled": [True],
}


class Outcome(NamedTuple):
    """What became of one change."""

    key: str
    value: str
    refusal: str  # ours; empty if we have decoded
    gap: float | None  # the largest difference of the logits, where both sides have decoded


# Other values of a key, by the type of its present one.
OTHERS = {
    bool: lambda value: (not value,),
    int: lambda value: (value + 1, 2 * value, 0),
    float: lambda value: (2 * value + 0.5, 0.0),
    NoneType: lambda value: (True, 3, 0.5),
    str: lambda value: ("none such",),
}


def changes(config: dict, known: dict) -> Iterator[tuple[str, str, dict]]:
    """Every changed config: key, what it was changed to, config. `known` holds the keys of all families."""
    for key in sorted({*config, *known, *VALUES}):
        if key in config:
            yield key, "left out", {k: v for k, v in config.items() if k != key}
        present = config.get(key, known.get(key))
        for value in VALUES[key] if key in VALUES else OTHERS.get(type(present), lambda value: (None,))(present):
            if key not in config or value != config[key]:
                yield key, repr(value), config | {key: value}


def all_keys() -> dict:
    """The keys of all families with their default values."""
    found = {}
    for family in FAMILIES:
        found |= AutoConfig.for_model(family, **SMALL).to_dict()
    return {key: value for key, value in found.items() if not isinstance(value, dict | list)}


@torch.inference_mode()
def outcomes(family: str, folder: Path, every: int) -> list[Outcome]:
    """What became of every n-th change of a family's config."""
    logging.set_verbosity_error()
    save_hf(folder, family, **FAMILIES[family])
    file, out = folder / "config.json", []
    for key, value, changed in list(changes(json.loads(file.read_text()), all_keys()))[::every]:
        file.write_text(json.dumps(changed))
        theirs, _ = attempt(lambda: theirs_of(folder))
        ours, refusal = attempt(lambda: load_target(folder, tokenizer=False, dtype="fp32")(IDS, None)[0])
        gap = None
        if ours is not None and theirs is not None and ours.shape == theirs.shape:
            same_nan = torch.equal(ours.isnan(), theirs.isnan())
            gap = (ours - theirs).abs().nan_to_num(0).max().item() if same_nan else float("inf")
        out.append(Outcome(key, value, refusal, gap))
    return out


def attempt(decode) -> tuple[torch.Tensor | None, str]:
    """Logits, and the reason why there are none."""
    try:
        return decode(), ""
    except Exception as error:  # transformers raises errors of any type
        return None, f"{type(error).__name__}: {error}"


def theirs_of(folder: Path) -> torch.Tensor:
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    if info["missing_keys"] or info["mismatched_keys"]:
        raise ValueError(f"lacks {sorted(info['missing_keys'])[:1]}")
    return model(IDS, return_dict=True).logits


@pytest.mark.matrix
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore")  # transformers' own, of values that are not meant
def test_every_key_is_read_as_transformers_reads_it_or_refused(family, tmp_path, capfd, whole):
    """Every change with --whole, otherwise every fourth."""
    found = outcomes(family, tmp_path, every=1 if whole else 4)
    capfd.readouterr()  # notes of what transformers' modules decode
    agreed = [o for o in found if o.gap is not None and o.gap < 1e-4]
    assert [o for o in found if not (o in agreed or o.refusal or (o.key, o.value) in HARMLESS)] == []
    for outcome in found:
        assert not outcome.refusal or outcome.refusal.startswith("ValueError: "), outcome
        assert "\n" not in outcome.refusal, outcome
    assert len(agreed) > (80 if whole else 20), "most changes do not matter, or are read"
    assert len({o.key for o in found}) > (50 if whole else 25)
    if whole:
        decoded = {(o.key, o.value) for o in found if o.gap is not None}
        assert {("rope_theta", "50.0"), ("rms_norm_eps", "0.0")} <= decoded, "something was changed that matters"
