"""A target's weights in the formats of other engines, written from memory. Tokens are named by their numbers.

So a target needs no tokenizer that another engine knows, random weights will do, and nothing is downloaded.
`ctranslate2.specs` writes CTranslate2's model. Its converter of transformers' checkpoints does not fit: it drops
`head_dim` if that is not hidden / heads, and the factor of Llama 3's rope (seen in 4.8.5). The package `gguf` writes
llama.cpp's file, and knows the names of its tensors.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.model.archs import ModelConfig
from specdec.model.layers import RMSNorm
from specdec.model.loader import target_parameters
from specdec.model.rope import Rope
from specdec.model.target import SandwichBlock, Target

# Fields of a GGUF file, as methods `add_NAME` of its writer -> fields of `ModelConfig`.
GGUF_FIELDS = {
    "vocab_size": "vocab", "context_length": "context", "embedding_length": "hidden", "block_count": "layers",
    "feed_forward_length": "intermediate", "head_count": "heads", "head_count_kv": "kv_heads",
    "key_length": "head_dim", "value_length": "head_dim", "rope_dimension_count": "head_dim",
    "layer_norm_rms_eps": "eps",
}  # fmt: skip


def write_ctranslate2(target: Target, kind: str, folder: Path) -> None:
    """Write model.bin, vocabulary.json and config.json. kind: CTranslate2's name of the dtype."""
    from ctranslate2.specs import common_spec, transformer_spec

    config = target.config
    activations = {"silu": common_spec.Activation.SWISH, "gelu_tanh": common_spec.Activation.GELUTanh}
    how: dict[str, Any] = {"ffn_glu": True, "rms_norm": True, "activation": activations[config.activation]}
    how |= {"rotary_dim": config.head_dim, "rotary_interleave": False, "head_dim": config.head_dim}
    how |= {"num_heads_kv": None if config.kv_heads == config.heads else config.kv_heads}
    how |= {"qk_norm": config.qk_norm, "pre_post_layer_norm": config.sandwich_norms}
    spec = transformer_spec.TransformerDecoderModelSpec.from_config(config.layers, config.heads, **how)
    spec.decoder.scale_embeddings = config.embed_scale is not None  # by the root of the width, as Gemma's
    decoder = spec.decoder
    pairs: list[tuple[Any, Any]] = [(target.embed, decoder.embeddings), (target.head, decoder.projection)]
    pairs += [(target.norm, decoder.layer_norm)]
    for i, (layer, block) in enumerate(zip(decoder.layer, target.blocks, strict=True)):
        attention, ffn, own = layer.self_attention, layer.ffn, block.attention
        # Not by assignment: the class has no field for Llama 3's factor, which the engine reads.
        vars(attention).update(attention_values(config, i))
        pairs += [(own.qkv, attention.linear[0]), (own.o, attention.linear[1]), (block.mlp.down, ffn.linear_1)]
        pairs += [(block.mlp.gate_up, (ffn.linear_0, ffn.linear_0_noact))]
        if isinstance(block, SandwichBlock):
            pairs += [(block.input_norm, layer.input_layer_norm), (block.post_norm, layer.pre_feedforward_layer_norm)]
            pairs += [(block.attention_norm, layer.post_attention_layer_norm)]
            pairs += [(block.mlp_norm, layer.post_feedforward_layer_norm)]
        else:
            pairs += [(block.input_norm, attention.layer_norm), (block.post_norm, ffn.layer_norm)]
        if config.qk_norm:
            pairs += [(own.q_norm, attention.q_norm), (own.k_norm, attention.k_norm)]
    for module, place in pairs:
        if isinstance(module, RMSNorm):
            place.gamma = module.gain().detach().contiguous()
            continue
        places = place if isinstance(place, tuple) else (place,)  # equal parts of the rows in each
        for name, value in module.named_parameters():
            for one, part in zip(places, value.detach().chunk(len(places)), strict=True):
                setattr(one, name, part.contiguous())
    spec.register_vocabulary([str(token) for token in range(target.vocab)])
    # It wants a token for each of these. None is used: prompts are token ids, and no token ends a text.
    spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = "0"
    spec.config.layer_norm_epsilon = config.eps
    spec.validate()
    spec.optimize(quantization=kind)
    spec.save(str(folder))


def attention_values(config: ModelConfig, layer: int) -> dict[str, np.generic]:
    """Return rope and scale of a layer's attention, under CTranslate2's names."""
    slides = bool(config.sliding) and config.sliding[layer]
    rope = config.local_rope if slides and config.local_rope else config.rope
    values: dict[str, Any] = {"rotary_base": rope.theta}
    if config.attention_scale is not None:
        values["queries_scale"] = config.attention_scale
    if rope.scaling != "default":
        values["rotary_scaling_factor"] = rope.factor
    if rope.scaling == "llama3":
        values |= {"rotary_low_freq_factor": rope.low_freq_factor, "rotary_high_freq_factor": rope.high_freq_factor}
    found: dict[str, np.generic] = {name: np.float32(value) for name, value in values.items()}
    if rope.scaling != "default":
        found["rotary_scaling_type"] = np.int8({"linear": 0, "llama3": 2}[rope.scaling])  # its enum RotaryScalingType
    if rope.scaling == "llama3":
        found["original_max_position_embeddings"] = np.int32(rope.original_context)
    return found


def write_gguf(
    path: Path, target: Target, name: str, dtype: torch.dtype, vocabulary: Callable[..., None] | None = None
) -> None:
    """Write a GGUF file of llama.cpp's architecture `name`: matrices in `dtype`, vectors in fp32.

    `vocabulary` adds the tokenizer to a `GGUFWriter`. By default the tokens have no text.
    """
    import gguf

    config, rope, writer = target.config, target.config.rope, gguf.GGUFWriter(path, name, use_temp_file=True)
    values = {field: getattr(config, own) for field, own in GGUF_FIELDS.items()} | {"rope_freq_base": rope.theta}
    if rope.scaling == "linear":
        values |= {"rope_scaling_type": gguf.RopeScalingType.LINEAR, "rope_scaling_factor": rope.factor}
    if name == "gemma3" and config.window is not None and config.local_rope is not None:
        values |= {"sliding_window": config.window, "rope_freq_base_swa": config.local_rope.theta}
    for field, value in values.items():
        getattr(writer, f"add_{field}")(value)
    if vocabulary is not None:
        vocabulary(writer)
    else:
        _number_tokens(writer, config.vocab)
    kind = gguf.GGMLQuantizationType
    kinds = {torch.float32: kind.F32, torch.float16: kind.F16, torch.bfloat16: kind.BF16}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[name.upper()], config.layers)
    for key, tensor in tensors(target, name):
        tensor = tensor.to(dtype if tensor.ndim > 1 else torch.float32).contiguous()
        own = str(names.get_name(key, try_suffixes=(".weight", ".bias")))
        writer.add_tensor(own, tensor.view(torch.uint8).numpy(), raw_dtype=kinds[tensor.dtype])
    finish(writer)


def copy_gguf(path: Path, source: Path, vocab: int) -> None:
    """Copy a model's GGUF file with its tensors as they are, but tokens without text instead of its tokenizer."""
    import gguf

    reader = gguf.GGUFReader(source)
    architecture: Any = reader.get_field("general.architecture")
    writer = gguf.GGUFWriter(path, architecture.contents())
    for name, field in reader.fields.items():
        if not name.startswith(("GGUF.", "tokenizer.", "general.")):
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    _number_tokens(writer, vocab)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    finish(writer)


def _number_tokens(writer: Any, vocab: int) -> None:
    """Of the tokenizers that llama.cpp has, rwkv's needs a list of tokens only, and has no end-of-text token."""
    writer.add_tokenizer_model("rwkv")
    writer.add_token_list([f"<{token}>" for token in range(vocab)])


def finish(writer: Any) -> None:
    """Write the file of a `GGUFWriter`."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors(target: Target, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors under transformers' names, and the divisors of a plain rope's frequencies."""
    config = target.config
    if config.rope.scaling == "llama3":
        plain = Rope(config.rope.theta).inverse_frequencies(config.head_dim)
        yield "rope_freqs.weight", plain / config.rope.inverse_frequencies(config.head_dim)
    turned = {"q_proj": config.heads, "k_proj": config.kv_heads} if name == "llama" else {}
    for key, rows in target_parameters(target).items():
        value = rows.detach()
        if config.norm_offset and "norm" in key:
            value = 1 + value.float()
        if heads := turned.get(key.split(".")[-2]):  # its rope turns neighbours (2i, 2i+1), not halves (i, i+Dh/2)
            value = value.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        yield key, value
