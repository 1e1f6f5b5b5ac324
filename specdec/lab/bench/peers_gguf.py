"""A target as a GGUF file, the format of llama.cpp.

The layout of the file is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, version 3. Names of tensors
and keys are those that llama.cpp reads for each of its architectures. Its tokens are called <0>, <1> and so on, so that
a text names the tokens that it is made of, and no token ends a text.
"""

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from specdec.lab.bench.contenders import NotAvailable
from specdec.lab.bench.peers_common import check_parts
from specdec.model.archs import ModelConfig
from specdec.model.target import Block, Target

ALIGNMENT = 32  # bytes; what a file without the key general.alignment has
TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}  # ggml_type
UINT32, FLOAT32, STRING, ARRAY = 4, 6, 8, 9  # of metadata values

# llama.cpp's architectures -> the parts of `ModelConfig` that each reads.
PARTS = {
    "llama": frozenset({"qkv_bias", "o_bias", "mlp_bias", "rope.linear", "rope.llama3"}),
    "qwen2": frozenset({"qkv_bias", "rope.linear"}),
    "qwen3": frozenset({"qk_norm", "rope.linear"}),
    "gemma3": frozenset(
        {"qk_norm", "norm_offset", "sandwich_norms", "activation", "embed_scale", "local_rope", "sliding", "window"}
    ),
}

Lazy = tuple[tuple[int, ...], Callable[[], Tensor]]  # a tensor's shape, and how to make it


def architecture(config: ModelConfig, slots: int) -> str:
    """llama.cpp's name for models of this kind. Raises NotAvailable for a model that has a part it does not read."""
    if config.sandwich_norms:
        name = "gemma3"
    elif config.qk_norm:
        name = "qwen3"
    elif config.qkv_bias and not config.o_bias:
        name = "qwen2"
    else:
        name = "llama"
    check_parts(config, slots, PARTS[name], "llama.cpp")
    if name == "gemma3" and config.sliding != tuple((layer + 1) % 6 != 0 for layer in range(config.layers)):
        raise NotAvailable("llama.cpp takes it that every sixth layer of a Gemma 3 sees all positions, and no other")
    return name


def write_gguf(path: Path, target: Target, dtype: torch.dtype, slots: int) -> None:
    """Write the target: matrices in `dtype`, vectors in fp32. Raises NotAvailable as `architecture` does."""
    name = architecture(target.config, slots)
    meta = {"general.architecture": name, **metadata(target.config, name)}
    write_file(path, meta, dict(tensors(target, name)), dtype)


def metadata(config: ModelConfig, name: str) -> dict[str, object]:
    """The keys of an architecture, and a vocabulary that names tokens by their numbers."""
    keys = {
        "vocab_size": config.vocab,
        "context_length": config.context,
        "embedding_length": config.hidden,
        "block_count": config.layers,
        "feed_forward_length": config.intermediate,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.eps),
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": float(config.rope.theta),
    }
    if config.rope.scaling == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(config.rope.factor)}
    if name == "gemma3":
        keys |= {"attention.sliding_window": config.window, "rope.freq_base_swa": float(config.local_rope.theta)}
    # Of the tokenizers that llama.cpp has, rwkv's needs a list of tokens only, and has no end-of-text token.
    tokens = [f"<{token}>" for token in range(config.vocab)]
    return {f"{name}.{key}": value for key, value in keys.items()} | {
        "tokenizer.ggml.model": "rwkv",
        "tokenizer.ggml.tokens": tokens,
    }


def tensors(target: Target, name: str) -> Iterator[tuple[str, Lazy]]:
    """All tensors by llama.cpp's names."""
    config = target.config
    yield "token_embd.weight", _lazy(target.embed.weight)
    yield "output_norm.weight", _lazy(target.norm.gain())
    if not config.tied:
        yield "output.weight", _lazy(target.head.weight)
    if config.rope.scaling == "llama3":
        yield "rope_freqs.weight", ((config.head_dim // 2,), lambda: rope_factors(config))
    for i, block in enumerate(target.blocks):
        for key, lazy in _block_tensors(block, config, interleaved=name == "llama"):
            yield f"blk.{i}.{key}", lazy


def rope_factors(config: ModelConfig) -> Tensor:
    """[Dh/2], what llama.cpp divides the frequencies of a plain rope by."""
    plain = type(config.rope)(config.rope.theta)
    return plain.inverse_frequencies(config.head_dim) / config.rope.inverse_frequencies(config.head_dim)


def _block_tensors(block: Block, config: ModelConfig, interleaved: bool) -> Iterator[tuple[str, Lazy]]:
    attention, mlp = block.attention, block.mlp
    heads = {"attn_q": config.heads, "attn_k": config.kv_heads, "attn_v": config.kv_heads}
    for kind in ("weight", "bias"):
        qkv, gate_up = getattr(attention.qkv, kind), getattr(mlp.gate_up, kind)
        if qkv is not None:
            parts = qkv.split([count * config.head_dim for count in heads.values()])
            for (key, count), part in zip(heads.items(), parts, strict=True):
                turned = interleaved and key != "attn_v"
                yield f"{key}.{kind}", _lazy(part, (lambda x, n=count: interleave(x, n)) if turned else None)
        if gate_up is not None:
            gate, up = gate_up.chunk(2)
            yield f"ffn_gate.{kind}", _lazy(gate)
            yield f"ffn_up.{kind}", _lazy(up)
        for key, linear in (("attn_output", attention.o), ("ffn_down", mlp.down)):
            if (part := getattr(linear, kind)) is not None:
                yield f"{key}.{kind}", _lazy(part)
    norms = {"attn_norm": block.input_norm, "ffn_norm": block.post_norm}
    norms |= {"attn_q_norm": attention.q_norm, "attn_k_norm": attention.k_norm}
    if config.sandwich_norms:
        norms |= {"post_attention_norm": block.attention_norm, "post_ffw_norm": block.mlp_norm}
    for key, norm in norms.items():
        if norm is not None:
            yield f"{key}.weight", _lazy(norm.gain())


def interleave(rows: Tensor, heads: int) -> Tensor:
    """Rows [heads*Dh,...] of q or k in the order for ropes that turn neighbours (2i, 2i+1), not halves (i, i+Dh/2)."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _lazy(weight: Tensor, change: Callable[[Tensor], Tensor] | None = None) -> Lazy:
    weight = weight.detach()
    return tuple(weight.shape), (lambda: weight) if change is None else (lambda: change(weight))


def write_file(path: Path, meta: dict[str, object], named: dict[str, Lazy], dtype: torch.dtype) -> None:
    """Write a GGUF file. One tensor at a time is made: matrices in `dtype`, vectors in fp32."""
    kinds = {name: dtype if len(shape) > 1 else torch.float32 for name, (shape, _) in named.items()}
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, len(named), len(meta)))
        for key, value in meta.items():
            file.write(_string(key) + _value(value))
        offset = 0
        for name, (shape, _) in named.items():
            dims = struct.pack(f"<{len(shape)}Q", *reversed(shape))
            place = struct.pack("<IQ", TYPES[kinds[name]], offset)
            file.write(_string(name) + struct.pack("<I", len(shape)) + dims + place)
            size = torch.Size(shape).numel() * kinds[name].itemsize
            offset += size + -size % ALIGNMENT
        for name, (_, make) in named.items():
            _align(file)
            make().to(kinds[name]).contiguous().view(torch.uint8).numpy().tofile(file)
        _align(file)


def _align(file: BinaryIO) -> None:
    file.write(b"\0" * (-file.tell() % ALIGNMENT))


def _string(text: str) -> bytes:
    raw = text.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def _value(value: object) -> bytes:
    """A metadata value behind its type."""
    if isinstance(value, int):
        return struct.pack("<II", UINT32, value)
    if isinstance(value, float):
        return struct.pack("<If", FLOAT32, value)
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _string(value)
    head = struct.pack("<IIQ", ARRAY, STRING, len(value))
    return head + b"".join(_string(item) for item in value)
