"""Load a target from Hugging Face files: a folder or a hub name, one safetensors file or shards."""

import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, cast

import torch
from torch import Tensor, nn

from specdec.model.archs import ModelConfig, NotNative, is_wrapped, read_config, set_aside, text_config, text_name
from specdec.model.attention import Attention
from specdec.model.checkpoint import (
    StrictFill,
    check_device,
    check_shapes,
    choose_dtype,
    fused,
    read_headers,
    read_tensors,
    whole,
)
from specdec.model.config_fields import check_config, ends_of, note_generation, read_eos
from specdec.model.language_model import LanguageModel
from specdec.model.layers import GatedMLP
from specdec.model.names import resolve
from specdec.model.target import SandwichBlock, Target
from specdec.model.weight_files import read_json
from specdec.schema import named_arguments, shown

LAYER = re.compile(r"model\.layers\.(\d+)\.")
# Architectures of drafters, by what published checkpoints and ours say.
DRAFTER = re.compile(r"Eagle3?(Speculator)?$|Medusa|^MtpDrafter$|DFlash|DSpark|DraftModel")

Kind = TypeVar("Kind", bound=Target)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def target_parameters(target: Target) -> dict[str, Tensor]:
    """Map tensor names in the Llama layout, which all native families share, to their rows in the target."""
    config = target.config
    out = whole(target.embed, "model.embed_tokens") | whole(target.norm, "model.norm")
    if not config.tied:
        out |= whole(target.head, "lm_head")
    for i, block in enumerate(target.blocks):
        at = f"model.layers.{i}"
        out |= attention_parameters(block.attention, f"{at}.self_attn") | mlp_parameters(block.mlp, f"{at}.mlp")
        out |= whole(block.input_norm, f"{at}.input_layernorm")
        if isinstance(block, SandwichBlock):
            out |= whole(block.attention_norm, f"{at}.post_attention_layernorm")
            out |= whole(block.post_norm, f"{at}.pre_feedforward_layernorm")
            out |= whole(block.mlp_norm, f"{at}.post_feedforward_layernorm")
        else:
            out |= whole(block.post_norm, f"{at}.post_attention_layernorm")
    return out


def attention_parameters(attention: Attention, at: str) -> dict[str, Tensor]:
    """Map the tensor names of an attention in the Llama layout, after the prefix `at`, to their rows in it."""
    q, kv = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    out = fused(attention.qkv, [f"{at}.{x}_proj" for x in "qkv"], [2 * q if attention.gate else q, kv, kv])
    out |= whole(attention.o, f"{at}.o_proj")
    if attention.q_norm is not None and attention.k_norm is not None:
        out |= whole(attention.q_norm, f"{at}.q_norm") | whole(attention.k_norm, f"{at}.k_norm")
    return out


def mlp_parameters(mlp: GatedMLP, at: str) -> dict[str, Tensor]:
    """Map the tensor names of a gated MLP in the Llama layout, after the prefix `at`, to their rows in it."""
    gate_up = fused(mlp.gate_up, [f"{at}.gate_proj", f"{at}.up_proj"], [mlp.down.in_features] * 2)
    return gate_up | whole(mlp.down, f"{at}.down_proj")


@named_arguments
def load_target(
    path: "str | os.PathLike | PreTrainedModel",
    *,
    dtype: str = "auto",
    device: str = "cpu",
    tokenizer: "bool | PreTrainedTokenizerBase" = True,
    generic: bool = False,
    allow_nonfinite: bool = False,
    tp_plan: str | None = None,
    device_map: str | None = None,
) -> LanguageModel:
    """Load a target from a checkpoint folder, a GGUF file, a hub name, or a transformers model in memory.

    Args:
        path: Folder, GGUF file, hub name or model. A model keeps its dtype and device; native targets copy weights.
        dtype: fp32, fp16, bf16 or auto (the checkpoint's on a GPU, fp32 on a CPU).
        device: Such as cpu or cuda:1.
        tokenizer: Whether to load the tokenizer, or the tokenizer itself. A model in memory comes without one.
        generic: Use transformers' modules, as for families that are not native and on several devices.
        allow_nonfinite: Accept weights with NaN or Inf.
        tp_plan: 'auto' splits the target among the processes of torchrun.
        device_map: 'auto' spreads layers over GPUs, memory and disk; or a JSON file.

    Raises ValueError if the checkpoint is damaged or not supported.
    """
    if tp_plan and device_map:
        raise ValueError("give a tp_plan or a device_map, not both")
    if tp_plan not in (None, "auto"):
        raise ValueError(f"tp_plan must be auto, or not given, got {shown(tp_plan)}")
    if not isinstance(path, str | os.PathLike):
        return model_in_memory(path, tokenizer, generic, allow_nonfinite)
    raw = read_json((folder := resolve(path)) / "config.json")
    refuse_drafter(raw, str(path))
    place = check_device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if tp_plan and device == "cuda" else device)
    if place.index is not None and place.type == "cuda":
        torch.cuda.set_device(place)  # Triton launches on the current device, whatever its tensors are on
    weights = choose_dtype(dtype, text_config(raw), place)
    try:
        config = read_config(raw, str(path))
    except NotNative as reason:
        note, config = f"note: {path}: {reason}; transformers' own modules decode it, which is slower", None
    if config is None or generic or tp_plan or device_map:
        from specdec.model.hf_load import load_transformers  # here, as transformers' models take seconds to import

        loaded = load_transformers(folder, str(path), weights, place, allow_nonfinite, tp_plan, device_map)
        if config is None:
            print(note, file=sys.stderr)
        elif tp_plan or device_map:
            loaded.take_shape(config)
        target: LanguageModel = loaded
    else:
        held = read_headers(folder), read_tensors(folder)
        target = load_native(str(path), raw, config, *held, weights, place, allow_nonfinite)
    if is_wrapped(raw):
        print(f"note: {path}: it reads and writes text only; what sees or hears is left out", file=sys.stderr)
    target.eval().name, target.eos = str(path), read_eos(folder, raw)
    note_generation(folder, str(path))
    if tokenizer:
        target.tokenizer = load_tokenizer(folder) if tokenizer is True else tokenizer
    return target


def model_in_memory(
    model: "PreTrainedModel", tokenizer: "bool | PreTrainedTokenizerBase", generic: bool, allow_nonfinite: bool
) -> LanguageModel:
    """Return a target with the weights of a causal language model of transformers. See `load_target`.

    Raises TypeError for another object, and ValueError for a model that we cannot run.
    """
    if not is_transformers(model):
        kind = type(model).__name__
        raise TypeError(
            f"path must be a folder, a hub name, or a model of transformers in memory, got an object of {kind}"
        )
    name, raw = type(model).__name__, model.config.to_dict()
    try:
        config = None if generic else read_config(raw, name)
    except NotNative:
        config = None
    if config is None:
        from specdec.model.hf_target import TransformersTarget

        target: LanguageModel = TransformersTarget(model)
    else:
        weights = model.state_dict()
        if config.tied:
            weights.pop("lm_head.weight", None)
        place = cast(nn.Embedding, model.get_input_embeddings()).weight
        target = load_native(name, raw, config, weights, weights.items(), place.dtype, place.device, allow_nonfinite)
    target.eval().name = name
    ends = model.generation_config.eos_token_id if model.generation_config else None
    target.eos = frozenset([ends] if isinstance(ends, int) else ends or ends_of(raw))
    target.tokenizer = None if isinstance(tokenizer, bool) else tokenizer
    return target


def is_transformers(model: object) -> "TypeGuard[PreTrainedModel]":
    """Return whether this is a model of transformers, without importing transformers."""
    loaded = sys.modules.get("transformers")
    return loaded is not None and isinstance(model, loaded.PreTrainedModel)


def refuse_drafter(config: dict, name: str) -> None:
    """Raise ValueError for the config of a drafter, for which other errors would be less clear."""
    named = config.get("architectures")
    for kind in named if isinstance(named, list) else ():
        if isinstance(kind, str) and DRAFTER.search(kind):
            raise ValueError(f"{name} is a drafter ({kind}), not a target: give it as the draft, with a target")


def load_native(
    name: str,
    raw: dict,
    config: ModelConfig,
    headers: Mapping[str, Tensor],
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    device: torch.device,
    allow_nonfinite: bool,
) -> Target:
    """Return our own decoder, filled with every tensor of the target. headers: shapes of the tensors, by name.

    Raises ValueError for a tensor that is missing, left over, of another shape, or not finite in this dtype.
    """
    headers = {text_name(tensor, raw): value for tensor, value in headers.items()}
    check_sizes(name, config, headers)
    target, fill = allocate(Target, config, name, headers, dtype, device, allow_nonfinite)
    spare_head = None
    for tensor, value in tensors:
        key = text_name(tensor, raw)
        if key == "lm_head.weight" and config.tied:
            spare_head = value
        elif not fill.put(key, value) and not set_aside(tensor, raw):
            raise ValueError(
                f"{name}: the checkpoint holds the tensor {tensor}, for which the architecture has no place"
            )
    fill.finish()
    if config.tied:
        if spare_head is not None and not torch.equal(spare_head.to(target.embed.weight), target.embed.weight):
            raise ValueError(
                f"{name}: lm_head.weight differs from the embedding, but the config says that they are tied"
            )
        target.head.weight = target.embed.weight
    return target


def allocate(
    kind: type[Kind],
    config: ModelConfig,
    name: str,
    headers: Mapping[str, Tensor],
    dtype: torch.dtype,
    device: torch.device,
    allow_nonfinite: bool = False,
) -> tuple[Kind, StrictFill]:
    """Return a target of this class with memory for its weights, and what fills them, once the shapes are checked."""
    with torch.device("meta"):
        target = kind(config).to(dtype)
    check_shapes(name, headers, {key: rows.shape for key, rows in target_parameters(target).items()})
    target.to_empty(device=device)
    return target, StrictFill(name, target_parameters(target), finite=not allow_nonfinite)


def check_sizes(name: str, config: ModelConfig, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError, with the field's name, for a size in the config that differs from the tensors' shapes.

    The tensors may be on the meta device. Nothing is built before this.
    """
    layers = 1 + max((int(m[1]) for m in map(LAYER.match, tensors) if m), default=-1)
    if 0 < layers < config.layers:
        raise ValueError(f"{name}: num_hidden_layers is {config.layers}, but the files hold {layers} layers")
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    first = "model.layers.0"
    for field, tensor, axis, size in (
        ("vocab_size", "model.embed_tokens.weight", 0, config.vocab),
        ("hidden_size", "model.embed_tokens.weight", 1, config.hidden),
        ("intermediate_size", f"{first}.mlp.up_proj.weight", 0, config.intermediate),
        ("num_attention_heads times head_dim", f"{first}.self_attn.q_proj.weight", 0, q),
        ("num_key_value_heads times head_dim", f"{first}.self_attn.k_proj.weight", 0, kv),
    ):
        shape = tensors[tensor].shape if tensor in tensors else ()
        if len(shape) == 2 and shape[axis] != size:
            raise ValueError(
                f"{name}: tensor {tensor} has shape {list(shape)}, but config.json gives {size} for {field}"
            )


def load_texts(path: str | os.PathLike) -> SimpleNamespace:
    """Load a target's `name`, tokenizer, `vocab`, `eos` and `config.context` alone, without weights.

    Raises ValueError as `load_target` does.
    """
    folder = resolve(path)
    raw = read_json(folder / "config.json")
    refuse_drafter(raw, str(path))
    config = text_config(raw)
    check_config(config, f"{path}: config.json", native=False)
    context, tokenizer = config.get("max_position_embeddings") or 2048, load_tokenizer(folder)
    return SimpleNamespace(
        name=str(path),
        tokenizer=tokenizer,
        vocab=config.get("vocab_size") or len(tokenizer),
        eos=read_eos(folder, raw),
        config=SimpleNamespace(context=context),
    )


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a checkpoint folder; ValueError if it has none that loads."""
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises a bare Exception for a malformed file
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{folder} has no tokenizer that loads: {reason}") from None
    length = tokenizer.model_max_length  # compared with every text's
    if isinstance(length, bool) or not isinstance(length, int | float):
        raise ValueError(f"{folder}: model_max_length in tokenizer_config.json must be a number, got {shown(length)}")
    return tokenizer
