"""Every published layout by its names and shapes, with random weights, and targets that these drafters fit."""

import json

import torch
from safetensors.torch import save_file

from specdec.model.archs import ModelConfig
from specdec.model.rope import Rope
from specdec.model.target import Target

H, V, U, I, LAYERS = 32, 40, 12, 48, 8  # noqa: E741
HEADS, KV, DIM = 4, 2, 16  # a head dimension that is not H / HEADS, as Qwen3-30B-A3B drafters have
CONFIG = {
    "hidden_size": H, "intermediate_size": I, "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": DIM,
    "rms_norm_eps": 1e-5, "vocab_size": V, "num_hidden_layers": 1, "max_position_embeddings": 64, "hidden_act": "silu",
}  # fmt: skip
IDS = [0, 1, 3, 4, 8, 9, 10, 20, 21, 30, 38, 39]


def layer_shapes(prefix: str, width: int) -> dict[str, tuple]:
    return {
        f"{prefix}.self_attn.q_proj.weight": (HEADS * DIM, width),
        f"{prefix}.self_attn.k_proj.weight": (KV * DIM, width),
        f"{prefix}.self_attn.v_proj.weight": (KV * DIM, width),
        f"{prefix}.self_attn.o_proj.weight": (H, HEADS * DIM),
        f"{prefix}.mlp.gate_proj.weight": (I, H),
        f"{prefix}.mlp.up_proj.weight": (I, H),
        f"{prefix}.mlp.down_proj.weight": (H, I),
        f"{prefix}.post_attention_layernorm.weight": (H,),
    }


def eagle3_shapes(layer: str, u: int = U) -> dict[str, tuple]:
    return layer_shapes(layer, 2 * H) | {
        f"{layer}.hidden_norm.weight": (H,),
        f"{layer}.input_layernorm.weight": (H,),
        "fc.weight": (H, 3 * H),
        "norm.weight": (H,),
        "lm_head.weight": (u, H),
    }


def mtp_shapes(at: str = "model.mtp_layers.0") -> dict[str, tuple]:
    """MiMo's names."""
    norms = {f"{at}.{n}_layernorm.weight": (H,) for n in ("token", "hidden", "input", "final")}
    return layer_shapes(at, H) | {f"{at}.input_proj.weight": (H, 2 * H)} | norms


def training_names(shapes: dict) -> dict:
    """The names that ModelOpt uses while it trains."""
    names = {
        "layers.0.hidden_norm.weight": "hidden_norm.weight",
        "layers.0.input_layernorm.weight": "input_embeds_norm.weight",
        "lm_head.weight": "eagle_lm_head.weight",
    }
    return {f"eagle_module.{names.get(k, k)}": v for k, v in shapes.items()}


def with_biases(shapes: dict) -> dict:
    return shapes | {k.replace("weight", "bias"): v[:1] for k, v in shapes.items() if k.split(".")[-2][0] in "qkv"}


def without(shapes: dict, *names: str) -> dict:
    return {k: v for k, v in shapes.items() if k not in names}


NESTED = {"transformer_layer_config": CONFIG | {"model_type": "llama"}, "draft_vocab_size": U}
SPECULATORS = {"speculators_model_type": "eagle3", **NESTED}
MAPPED = CONFIG | {"draft_vocab_size": U}
EAGLE3, LAYER_0 = eagle3_shapes("midlayer"), eagle3_shapes("layers.0")
EAGLE2 = layer_shapes("layers.0", H) | {"fc.weight": (H, 2 * H)}
MAPS = ("d2t", "t2d")


def listed(*layers: int) -> dict:
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}}


# case -> layout, config, names and shapes, maps
PUBLISHED = {
    "EAGLE": ("eagle3", MAPPED, EAGLE3, MAPS),
    "EAGLE, whole vocabulary": ("eagle3", CONFIG, eagle3_shapes("midlayer", u=V), ()),
    "SpecForge with a list": ("eagle3", MAPPED | listed(1, 3, 5), EAGLE3, MAPS),
    "EAGLE-3.1": (
        "eagle3", MAPPED | {"fc_norm": True, "norm_output": True, "norm_output_means": "feedback"},
        EAGLE3 | {f"fc_norm.{i}.weight": (H,) for i in range(3)}, MAPS,
    ),
    "speculators": ("speculators", SPECULATORS, LAYER_0, MAPS),
    "speculators with everything": (
        "speculators",
        SPECULATORS | {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
        | {"eagle_aux_hidden_state_layer_ids": [2, 4, 6]},
        LAYER_0 | {"input_norm.weight": (3 * H,), "embed_tokens.weight": (V, H)}, MAPS,
    ),
    "speculators, Qwen3 layer": (
        "speculators", SPECULATORS | {"transformer_layer_config": CONFIG | {"model_type": "qwen3"}},
        LAYER_0 | {f"layers.0.self_attn.{name}_norm.weight": (DIM,) for name in "qk"}, MAPS,
    ),
    "ModelOpt": ("modelopt", MAPPED, with_biases(LAYER_0), ("d2t",)),
    "ModelOpt without a head": ("modelopt", CONFIG, without(eagle3_shapes("layers.0", u=V), "lm_head.weight"), ()),
    "ModelOpt without a head, of a part of the vocabulary": (
        "modelopt", MAPPED, without(LAYER_0, "lm_head.weight"), ("d2t",)
    ),
    "ModelOpt, training": (
        "modelopt-training", MAPPED | listed(1, 3, 4), training_names(LAYER_0), ("eagle_module.d2t",)
    ),
    "EAGLE-2 of Llama 2": ("eagle", CONFIG, EAGLE2 | {"fc.bias": (H,)}, ()),
    "EAGLE-2 of Llama 3": (
        "eagle", CONFIG | {"bias": False, "rope_theta": 500000.0}, EAGLE2 | {"embed_tokens.weight": (V, H)}, ()
    ),
    "EAGLE-2 of speculators": (
        "speculators", {"speculators_model_type": "eagle", "fusion_bias": True, **NESTED},
        layer_shapes("transformer", H) | {"fusion_fc.weight": (H, 2 * H), "fusion_fc.bias": (H,)}, (),
    ),
}  # fmt: skip


def random_tensors(shapes: dict, maps: tuple[str, ...] = (), dtype=torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator).mul(0.3).to(dtype) for name, shape in shapes.items()}
    ids = torch.tensor(IDS)
    values = {"d2t": ids - torch.arange(U), "t2d": torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)}
    return tensors | {name: values[name.split(".")[-1]] for name in maps}


def edited(name: str, make):
    """A change of tensors: `make` of one of them in its place."""
    return lambda tensors: tensors.update({name: make(tensors[name]).contiguous()})


def permuted(offsets: bool):
    """A change of tensors that puts d2t in another order: its offsets, or their tokens."""

    def change(d2t):
        places = torch.arange(len(d2t))
        return d2t.roll(5) if offsets else (d2t + places).roll(5) - places

    return edited("d2t", change)


def publish(folder, case: str, change=None, **fields):
    """Write the checkpoint of a case as its publisher would, but for a change of its tensors and other fields."""
    _, config, shapes, maps = PUBLISHED[case]
    tensors = random_tensors(shapes, maps)
    if change:
        change(tensors)
    return written(folder, config | fields, {name: tensor.contiguous() for name, tensor in tensors.items()})


def make_target(**fields) -> Target:
    config = {
        "layers": LAYERS, "hidden": H, "intermediate": I, "heads": 4, "kv_heads": 2, "head_dim": 8, "vocab": V,
        "eps": 1e-5, "rope": Rope(500000.0), "context": 128, "tied": False,
    } | fields  # fmt: skip
    torch.manual_seed(0)
    return Target(ModelConfig(**config)).eval()


def written(folder, config: dict, tensors: dict):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder
