"""The parts of generation_config.json: EOS tokens, which decoding uses, and fields that it ignores."""

import sys
from pathlib import Path

from specdec.model.config_fields import ConfigFields
from specdec.model.weight_files import read_json
from specdec.schema import check, shown

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
    eos = config.get("eos_token_id", (config.get("text_config") or {}).get("eos_token_id"))
    return [eos] if isinstance(eos, int) else eos or []
