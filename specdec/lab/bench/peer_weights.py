"""A target's weights in the formats of other engines, written from memory. Tokens are called by their numbers.

CTranslate2's classes (`ctranslate2.specs`) write its model. Its converter of transformers' checkpoints does not fit: it
drops `head_dim` where that is not hidden / heads, and the factor of Llama 3's rope (seen in 4.8.5). The package `gguf`
writes the file of llama.cpp, whose names of tensors it knows.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from specdec.model.archs import ModelConfig
from specdec.model.loader import target_parameters
from specdec.model.target import Target

# CTranslate2


def write_ctranslate2(target: Target, kind: str, folder: Path) -> None:
    """Write model.bin, vocabulary.json and config.json. kind: CTranslate2's name of the dtype."""
    spec = specification(target)
    spec.register_vocabulary([str(token) for token in range(target.vocab)])
    # It wants a token for each of these. None is used: prompts are token ids, and no token ends a text.
    spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = "0"
    spec.config.layer_norm_epsilon = target.config.eps
    spec.validate()
    spec.optimize(quantization=kind)
    spec.save(str(folder))


def specification(target: Target):
    """Return the target as a `TransformerDecoderModelSpec`."""
    from ctranslate2.specs import common_spec, transformer_spec

    config = target.config
    activations = {"silu": common_spec.Activation.SWISH, "gelu_tanh": common_spec.Activation.GELUTanh}
    spec = transformer_spec.TransformerDecoderModelSpec.from_config(
        config.layers,
        config.heads,
        activation=activations[config.activation],
        ffn_glu=True,
        rms_norm=True,
        rotary_dim=config.head_dim,
        rotary_interleave=False,
        num_heads_kv=None if config.kv_heads == config.heads else config.kv_heads,
        head_dim=config.head_dim,
        qk_norm=config.qk_norm,
        pre_post_layer_norm=config.sandwich_norms,
    )
    decoder = spec.decoder
    decoder.scale_embeddings = config.embed_scale is not None  # by the root of the width, as Gemma's
    products, norms = [(decoder.embeddings, target.embed), (decoder.projection, target.head)], []
    norms.append((decoder.layer_norm, target.norm))
    for i, (layer, block) in enumerate(zip(decoder.layer, target.blocks, strict=True)):
        theirs, ours, ffn = layer.self_attention, block.attention, layer.ffn
        # Not by assignment: the class has no field for Llama 3's factor, which the engine reads.
        vars(theirs).update(attention_values(config, i))
        products += [(theirs.linear[0], ours.qkv), (theirs.linear[1], ours.o), (ffn.linear_1, block.mlp.down)]
        products.append(((ffn.linear_0, ffn.linear_0_noact), block.mlp.gate_up))
        if config.sandwich_norms:
            norms += [(layer.input_layer_norm, block.input_norm), (layer.pre_feedforward_layer_norm, block.post_norm)]
            norms += [(layer.post_attention_layer_norm, block.attention_norm)]
            norms += [(layer.post_feedforward_layer_norm, block.mlp_norm)]
        else:
            norms += [(theirs.layer_norm, block.input_norm), (ffn.layer_norm, block.post_norm)]
        if config.qk_norm:
            norms += [(theirs.q_norm, ours.q_norm), (theirs.k_norm, ours.k_norm)]
    for place, module in products:
        places = place if isinstance(place, tuple) else (place,)
        for name, value in module.named_parameters():
            for one, part in zip(places, value.detach().chunk(len(places)), strict=True):
                setattr(one, name, part.contiguous())
    for place, norm in norms:
        place.gamma = norm.gain().detach().contiguous()
    return spec


def attention_values(config: ModelConfig, layer: int) -> dict[str, np.generic]:
    """Return rope and scale of a layer's attention, under CTranslate2's names."""
    slides = bool(config.sliding) and config.sliding[layer]
    rope = config.local_rope if slides and config.local_rope else config.rope
    values: dict[str, np.generic] = {"rotary_base": np.float32(rope.theta)}
    if config.attention_scale is not None:
        values["queries_scale"] = np.float32(config.attention_scale)
    if rope.scaling != "default":
        kind = {"linear": 0, "llama3": 2}[rope.scaling]  # of its enum RotaryScalingType
        values |= {"rotary_scaling_type": np.int8(kind), "rotary_scaling_factor": np.float32(rope.factor)}
    if rope.scaling == "llama3":
        values["rotary_low_freq_factor"] = np.float32(rope.low_freq_factor)
        values["rotary_high_freq_factor"] = np.float32(rope.high_freq_factor)
        values["original_max_position_embeddings"] = np.int32(rope.original_context)
    return values


# llama.cpp


def write_gguf(path: Path, target: Target, name: str, dtype: torch.dtype) -> None:
    """Write a GGUF file of llama.cpp's architecture `name`: matrices in `dtype`, vectors in fp32."""
    import gguf

    config, writer = target.config, gguf.GGUFWriter(path, name, use_temp_file=True)  # else all of it is in memory too
    for key, value in metadata(config, name).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
        add[type(value)](key, value)
    kind = gguf.GGMLQuantizationType
    kinds = {torch.float32: kind.F32, torch.float16: kind.F16, torch.bfloat16: kind.BF16}
    arch = next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == name)
    names = gguf.get_tensor_name_map(arch, config.layers)
    for key, value in tensors(target, name):
        value = value.to(dtype if value.ndim > 1 else torch.float32).contiguous()
        own = names.get_name(key, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(own, value.view(torch.uint8).numpy(), raw_dtype=kinds[value.dtype])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def metadata(config: ModelConfig, name: str) -> dict[str, object]:
    """Return the keys of an architecture, and a vocabulary that names tokens by their numbers."""
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
    vocabulary = {"model": "rwkv", "tokens": [f"<{token}>" for token in range(config.vocab)]}
    own = {f"{name}.{key}": value for key, value in keys.items()}
    return own | {f"tokenizer.ggml.{key}": value for key, value in vocabulary.items()}


def tensors(target: Target, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors under transformers' names, and the divisors of a plain rope's frequencies."""
    config = target.config
    if config.rope.scaling == "llama3":
        plain = type(config.rope)(config.rope.theta).inverse_frequencies(config.head_dim)
        yield "rope_freqs.weight", plain / config.rope.inverse_frequencies(config.head_dim)
    turned = {"q_proj": config.heads, "k_proj": config.kv_heads} if name == "llama" else {}
    for key, (weight, start, rows) in target_parameters(target).items():
        value = weight.detach()[start : start + rows]
        if config.norm_offset and "norm" in key:
            value = 1 + value.float()
        if heads := turned.get(key.split(".")[-2]):
            value = interleaved(value, heads)
        yield key, value


def interleaved(rows: Tensor, heads: int) -> Tensor:
    """Reorder rows [heads*Dh,...] of q or k for ropes that turn neighbours (2i, 2i+1), not halves (i, i+Dh/2)."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
