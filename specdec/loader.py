"""Load a target from Hugging Face files: a folder or a hub name, one safetensors file or shards."""

import os
from pathlib import Path

import torch
from torch import Tensor

from specdec.archs import read_config
from specdec.checkpoint import StrictFill, check_device, choose_dtype, fused, read_json, read_tensors, resolve, whole
from specdec.model import Target, fast_layout


def target_parameters(target: Target) -> dict[str, tuple[Tensor, int, int]]:
    """Hugging Face names of the Llama layout, which all supported families share."""
    config = target.config
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    out = whole(target.embed, "model.embed_tokens") | whole(target.norm, "model.norm")
    if not config.tied:
        out |= whole(target.head, "lm_head")
    for i, block in enumerate(target.blocks):
        at = f"model.layers.{i}"
        attention = block.attention
        out |= fused(attention.qkv, [f"{at}.self_attn.{x}_proj" for x in "qkv"], [q, kv, kv])
        out |= whole(attention.o, f"{at}.self_attn.o_proj")
        if config.qk_norm:
            out |= whole(attention.q_norm, f"{at}.self_attn.q_norm") | whole(attention.k_norm, f"{at}.self_attn.k_norm")
        out |= whole(block.input_norm, f"{at}.input_layernorm") | whole(
            block.post_norm, f"{at}.post_attention_layernorm"
        )
        out |= fused(block.mlp.gate_up, [f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj"], [config.intermediate] * 2)
        out |= whole(block.mlp.down, f"{at}.mlp.down_proj")
    return out


def load_target(path: str | os.PathLike, *, dtype: str = "auto", device: str = "cpu", tokenizer: bool = True) -> Target:
    """A target from a checkpoint folder or hub name.

    dtype: fp32, fp16, bf16 or auto (the checkpoint's own on a GPU, fp32 on the CPU).
    Raises ValueError, one sentence, for anything that does not fit.
    """
    folder = resolve(path)
    raw = read_json(folder / "config.json")
    config = read_config(raw, str(path))
    place = check_device(device)
    with torch.device("meta"):
        target = Target(config).to(choose_dtype(dtype, raw, place))
    target.to_empty(device=place)
    fill = StrictFill(str(path), target_parameters(target))
    spare_head = None
    for name, value in read_tensors(folder):
        if name == "lm_head.weight" and config.tied:
            spare_head = value
        elif not fill.put(name, value) and not name.endswith("rotary_emb.inv_freq"):  # inv_freq: in old Llama files
            raise ValueError(f"{path}: the checkpoint holds the tensor {name}, for which the architecture has no place")
    fill.finish()
    if config.tied:
        if spare_head is not None and not torch.equal(spare_head.to(target.embed.weight), target.embed.weight):
            raise ValueError(
                f"{path}: lm_head.weight differs from the embedding, but the config says that they are tied"
            )
        target.head.weight = target.embed.weight
    fast_layout(target)
    target.eval().name = str(path)
    target.eos = read_eos(folder, raw)
    if tokenizer:
        target.tokenizer = load_tokenizer(folder)
    return target


def read_eos(folder: Path, config: dict) -> frozenset[int]:
    """End-of-sequence ids, from generation_config.json where there is one, as transformers does."""
    generation = folder / "generation_config.json"
    eos = read_json(generation).get("eos_token_id") if generation.is_file() else None
    eos = config.get("eos_token_id") if eos is None else eos
    return frozenset([eos] if isinstance(eos, int) else eos or [])


def load_tokenizer(folder: Path):
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare Exception for a malformed file
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{folder} has no tokenizer that loads: {reason}") from None
