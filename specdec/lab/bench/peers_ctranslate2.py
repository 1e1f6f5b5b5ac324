"""CTranslate2 as a contender. Its own classes (`ctranslate2.specs`) write the model, from the target's weights.

Its converter of transformers' checkpoints would do for most models, but it drops two things that matter: `head_dim`
where it is not hidden / heads, and the factor of Llama 3's rope (seen in 4.8.5; the engine reads both)."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from specdec.lab.bench.contenders import NotAvailable, TimedRun
from specdec.lab.bench.peer_sessions import CTranslate2Session
from specdec.lab.bench.peers_common import INSTALL, Peer, check_parts, shared_sampling
from specdec.model.archs import ModelConfig
from specdec.model.checkpoint import DTYPES
from specdec.model.target import Block, Target
from specdec.structs import Sampling

# Parts of `ModelConfig` that `specification` fills in. Windows are none of them: CTranslate2 limits the cache only, and
# within a longer prompt every token sees all.
BLOCK_PARTS = {"qkv_bias", "o_bias", "mlp_bias", "qk_norm", "norm_offset", "sandwich_norms", "activation"}
PARTS = frozenset(BLOCK_PARTS | {"attention_scale", "embed_scale", "local_rope", "rope.linear", "rope.llama3"})
# Its repetition penalty leaves out the prompt.
NAMES = {"temperature": "sampling_temperature", "top_k": "sampling_topk", "top_p": "sampling_topp"}
KINDS = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


class CTranslate2(Peer):
    """`generate_batch` of CTranslate2, which tells a callback of every token. What it draws does not depend on the
    seed: its threads have their own."""

    engine = "CTranslate2"

    def __init__(self, target: Target, slots: int, dtype: torch.dtype):
        super().__init__(target, slots, dtype)
        try:
            import ctranslate2
        except ImportError as error:
            raise NotAvailable(f"CTranslate2 cannot be imported ({error}): {INSTALL}") from None
        self.kind = KINDS[next(short for short, known in DTYPES.items() if known == dtype)]
        self.version = ctranslate2.__version__
        there = ctranslate2.get_supported_compute_types("cpu")
        if self.kind not in there:
            raise NotAvailable(f"CTranslate2 has no {self.kind} on this processor, it has {', '.join(sorted(there))}")
        check_parts(target.config, slots, PARTS, self.engine)
        settings = {"compute_type": self.kind, "intra_threads": self.threads}
        self.load(lambda folder: save(target, self.kind, folder), CTranslate2Session, **settings)

    def __call__(self, prompt: list[int], new: int, sampling: Sampling, seed: int) -> TimedRun:
        how = {"sampling_topk": 1 if sampling.greedy else 0} | shared_sampling(sampling, NAMES, self.engine)
        request = {"start_tokens": [[str(token) for token in prompt]], "max_length": new} | how
        return self.ask(request, self.cache_bytes(len(prompt) + new - 1))

    def details(self) -> dict:
        return {"engine": f"ctranslate2 {self.version}, {self.kind}", "threads": self.threads}


def save(target: Target, kind: str, folder: Path) -> None:
    """Write model.bin, vocabulary.json and config.json. Tokens are called by their numbers."""
    spec = specification(target)
    spec.register_vocabulary([str(token) for token in range(target.vocab)])
    # It wants a token for each of these. Nothing unknown is asked for, and no token ends a text that we ask for.
    spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = "0"
    spec.config.layer_norm_epsilon = target.config.eps
    spec.validate()
    spec.optimize(quantization=kind)
    spec.save(str(folder))


def specification(target: Target):
    """The target as a `TransformerDecoderModelSpec`."""
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
    decoder.embeddings.weight = _values(target.embed.weight)
    decoder.projection.weight = _values(target.head.weight)
    decoder.layer_norm.gamma = _values(target.norm.gain())
    for i, (layer, block) in enumerate(zip(decoder.layer, target.blocks, strict=True)):
        _fill_norms(layer, block)
        _fill_products(layer, block)
        # Not by assignment: the class has no field for Llama 3's factor, which the engine reads.
        vars(layer.self_attention).update(attention_values(config, i))
    return spec


def _fill_norms(layer, block: Block) -> None:
    attention = block.attention
    if hasattr(block, "mlp_norm"):
        norms = {layer.input_layer_norm: block.input_norm, layer.post_attention_layer_norm: block.attention_norm}
        norms |= {layer.pre_feedforward_layer_norm: block.post_norm, layer.post_feedforward_layer_norm: block.mlp_norm}
    else:
        norms = {layer.self_attention.layer_norm: block.input_norm, layer.ffn.layer_norm: block.post_norm}
    if attention.q_norm is not None:
        norms |= {layer.self_attention.q_norm: attention.q_norm, layer.self_attention.k_norm: attention.k_norm}
    for theirs, ours in norms.items():
        theirs.gamma = _values(ours.gain())


def _fill_products(layer, block: Block) -> None:
    attention, mlp = block.attention, block.mlp
    for kind in ("weight", "bias"):
        gate_up = getattr(mlp.gate_up, kind)
        gate, up = (None, None) if gate_up is None else gate_up.chunk(2)
        values = {
            layer.self_attention.linear[0]: getattr(attention.qkv, kind),
            layer.self_attention.linear[1]: getattr(attention.o, kind),
            layer.ffn.linear_0: gate,
            layer.ffn.linear_0_noact: up,
            layer.ffn.linear_1: getattr(mlp.down, kind),
        }
        for spec, value in values.items():
            if value is not None:
                setattr(spec, kind, _values(value))


def attention_values(config: ModelConfig, layer: int) -> dict[str, np.generic]:
    """Rope and scale of a layer's attention, in CTranslate2's names."""
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


def _values(weight: Tensor) -> Tensor:
    return weight.detach().contiguous()
