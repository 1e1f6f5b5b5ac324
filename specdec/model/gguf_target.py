"""Targets in GGUF files: transformers reads a file once, and its folder in Hugging Face form stays in the user's cache.

Weights are dequantised to the values of llama.cpp's formats. A tensor is stored in bf16 where bf16 holds
all of its values, and in fp32 otherwise.
"""

import hashlib
import io
import json
import math
import os
import shutil
import sys
import time
from contextlib import redirect_stderr
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specdec.cli.files import keep, kept_folder
from specdec.schema import shown

CACHE = "gguf"  # folder of the user's cache
LIMIT = 32 * 2**30  # bytes of that folder; the folders used least recently are deleted first
IN_USE = 3600.0  # seconds since its last use for which a folder is never deleted
FREQUENCIES = "rope_freqs.weight"  # [Dh/2] what the rope's frequencies are divided by; not a parameter
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def only_gguf(folder: Path) -> Path | None:
    """Return the GGUF file of a folder without config.json, None if it holds none; ValueError if it holds several."""
    files = [] if (folder / "config.json").exists() else sorted(folder.glob("*.gguf"))
    if len(files) > 1:
        raise ValueError(f"{folder} holds {len(files)} GGUF files: give one of them, for example {files[0]}")
    return files[0] if files else None


def unpacked(file: Path, rounded: bool = False) -> Path:
    """Return the folder with config.json, safetensors and tokenizer of a GGUF file, made if it is not in the cache.

    rounded: round all weights to bf16, which halves what a round on a CPU reads. Raises ValueError if the file is cut
    short or holds no whole model, or if transformers cannot read it.
    """
    found = file.resolve().stat()
    identity = (str(file.resolve()), found.st_size, found.st_mtime_ns, rounded, version("transformers"))
    cache = kept_folder(CACHE)
    folder = cache / f"{file.stem}-{hashlib.sha256(repr(identity).encode()).hexdigest()[:12]}"
    if not folder.is_dir():
        _make_room(cache)
        keep(folder, lambda made: _unpack(file, made, rounded))
    os.utime(folder)
    return folder


def _make_room(cache: Path) -> None:
    """Delete the folders used least recently while the cache is larger than LIMIT."""
    folders = sorted((folder for folder in cache.iterdir() if folder.is_dir()), key=lambda x: x.stat().st_mtime)
    sizes = {folder: sum(file.stat().st_size for file in folder.rglob("*")) for folder in folders}
    total = sum(sizes.values())
    for folder in folders:
        if total <= LIMIT or time.time() - folder.stat().st_mtime < IN_USE:
            return
        shutil.rmtree(folder, ignore_errors=True)
        total -= sizes[folder]


def _unpack(file: Path, made: Path, rounded: bool) -> None:
    """Write the folder `made` from the file."""
    fields, tensors = _read_header(file)
    print(f"note: {file.name} is unpacked once into {made.parent.parent}", file=sys.stderr)
    model, tokenizer, info = _read(file, fields)
    weights = model.state_dict()
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    _check_complete(file, weights, tensors, info)
    made.mkdir()
    save_file({name: _stored(x, rounded) for name, x in weights.items()}, made / "model.safetensors")
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    for name in ("quantization_config", "_name_or_path", "name_or_path"):
        config.pop(name, None)
    _add_unread(file, config, fields, tensors.get(FREQUENCIES))
    (made / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tokenizer.save_pretrained(made)
    ends = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    stated = {"eos_token_id": sorted({end for end in ends if end is not None})}
    (made / "generation_config.json").write_text(json.dumps(stated) + "\n", encoding="utf-8")


def _read(file: Path, fields: dict) -> tuple:
    """Return transformers' model and tokenizer of a file, and its loading report."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from specdec.model.hf_load import quiet, reason_of

    try:
        with quiet(), redirect_stderr(io.StringIO()):  # of a progress bar that cannot be switched off
            config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
            head_dim = fields.get(f"{fields.get('general.architecture')}.attention.key_length")
            if head_dim is not None and hasattr(config, "head_dim"):  # transformers passes over it in some families
                config.head_dim = head_dim
            how: dict[str, Any] = {"config": config, "dtype": torch.float32, "output_loading_info": True}
            how["ignore_mismatched_sizes"] = True  # `_check_complete` refuses them, and names one
            loaded: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, **how)
            model, info = loaded
            return model, AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name), info
    except Exception as error:  # readers and modules of any family raise errors of any type
        raise ValueError(f"{file}: transformers cannot read it: {reason_of(error)}") from None


def _stored(x: Tensor, rounded: bool) -> Tensor:
    narrow = x.bfloat16()
    return (narrow if rounded or torch.equal(narrow.float(), x) else x).contiguous()


def _read_header(file: Path) -> tuple[dict, dict[str, Tensor]]:
    """Return the metadata, and the tensors by name: FREQUENCIES itself, and the others on the meta device."""
    from gguf import GGUFReader

    try:
        with file.open("rb") as start:
            if start.read(4) != b"GGUF":
                raise ValueError("it does not begin with the letters GGUF")
        reader = GGUFReader(file)
        fields = {key: field.contents() for key, field in reader.fields.items() if len(field.data) < 2}
        end = max((int(x.data_offset + x.n_bytes) for x in reader.tensors), default=0)
    except Exception as error:  # the reader raises errors of many types for a damaged file
        reason = (str(error).strip() or "it ends too early").splitlines()[0]
        raise ValueError(f"{file} is damaged or not GGUF: {reason:.200}") from None
    kind, splits = fields.get("general.type", "model"), fields.get("split.count", 0)
    if kind != "model":
        raise ValueError(f"{file} holds general.type {shown(kind)} and not a whole model: give the model's own file")
    if isinstance(splits, int) and splits > 1:
        raise ValueError(f"{file} is one of {splits} parts: join them with llama-gguf-split --merge")
    if not reader.tensors:
        raise ValueError(f"{file} holds no tensors: give a file with a model's weights")
    if end > file.stat().st_size:
        raise ValueError(f"{file} is cut short: its tensors end at byte {end}, and the file at {file.stat().st_size}")
    layers = len({x.name.split(".")[1] for x in reader.tensors if x.name.startswith("blk.")})
    stated = fields.get(f"{fields.get('general.architecture')}.block_count")
    if isinstance(stated, int) and stated > layers:
        raise ValueError(f"{file} is damaged: block_count is {stated}, but it holds {layers} layers")
    return fields, {
        x.name: torch.tensor(x.data) if x.name == FREQUENCIES else torch.empty([*map(int, x.shape)], device="meta")
        for x in reader.tensors
    }


def _check_complete(file: Path, weights: dict[str, Tensor], tensors: dict[str, Tensor], info: dict) -> None:
    """Raise ValueError unless the file's values are the model's, as transformers passes over what it does not know."""
    for name, found, wanted in sorted(info["mismatched_keys"]):
        raise ValueError(f"{file}: tensor {name} has shape {list(found)}, its metadata ask for {list(wanted)}")
    if info["missing_keys"]:
        raise ValueError(f"{file} lacks the tensor {min(info['missing_keys'])}")
    there = sum(x.numel() for name, x in tensors.items() if name != FREQUENCIES)
    wanted = sum(x.numel() for x in weights.values())
    if there != wanted:
        raise ValueError(
            f"{file} holds {there} values, but transformers' model of it has {wanted}: it has tensors that "
            "transformers does not read; give the checkpoint in Hugging Face form"
        )


def _add_unread(file: Path, config: dict, fields: dict, divisors: Tensor | None) -> None:
    """Add to the config what transformers does not read: Gemma 3's attention scale and second rope; rope scaling."""
    arch, rope = fields["general.architecture"], config["rope_parameters"]
    if arch == "gemma3":
        # llama.cpp derives the scale. 62 layers are the 27B model, where it does not follow from the heads.
        wide, heads = config["num_hidden_layers"] == 62, config["num_attention_heads"]
        config["query_pre_attn_scalar"] = config["hidden_size"] // heads if wide else config["head_dim"]
        local = fields.get("gemma3.rope.freq_base_swa")
        rope["sliding_attention"] |= {} if local is None else {"rope_theta": local}
        rope = rope["full_attention"]
    rope |= _scaling(file, fields) if divisors is None else _divided(divisors, fields)


def _scaling(file: Path, fields: dict) -> dict:
    """Return the fields of `rope_parameters` for the scaling that the metadata state."""
    prefix = f"{fields['general.architecture']}.rope.scaling."
    stated = {key.removeprefix(prefix): value for key, value in fields.items() if key.startswith(prefix)}
    kind, factor = stated.get("type", "none"), stated.get("factor", 1.0)
    if kind == "none" or (kind == "linear" and factor == 1):
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and stated.get("attn_factor", 1.0) == 1:
        context = stated.get("original_context_length")
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": context}
    raise ValueError(f"{file}: rope.scaling.type {shown(kind)} is not read: give the checkpoint in Hugging Face form")


def _divided(divisors: Tensor, fields: dict) -> dict:
    """Return the rope whose frequencies are divided by `divisors` [Dh/2]: Llama 3's if its formula gives them."""
    from specdec.model.archs.base import read_rope

    arch, half = fields["general.architecture"], len(divisors)
    theta, factor = fields.get(f"{arch}.rope.freq_base", 10000.0), float(divisors.max())
    llama3 = {"rope_type": "llama3", "factor": factor, **LLAMA3}
    plain, scaled = (read_rope({"rope_parameters": {"rope_theta": theta} | more}) for more in ({}, llama3))
    ratio = plain.inverse_frequencies(2 * half) / scaled.inverse_frequencies(2 * half)
    if math.isfinite(factor) and torch.allclose(ratio, divisors.float(), rtol=1e-4):
        return llama3
    listed, context = divisors.tolist(), fields.get(f"{arch}.context_length")
    return {
        "rope_type": "longrope", "factor": 1.0, "attention_factor": 1.0, "original_max_position_embeddings": context,
        "short_factor": listed, "long_factor": listed,
    }  # fmt: skip
