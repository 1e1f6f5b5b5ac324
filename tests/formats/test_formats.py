"""Every layout, by its published names and shapes: recognised, read strictly, converted to the others and back."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafters.formats import FAMILIES, eagle, eagle3, load_drafter, open_checkpoint, recognise
from drafters.formats.convert import convert, export
from specdec.model.archs import ModelConfig
from specdec.model.layers import Rope
from specdec.model.target import Target

H, V, U, I, LAYERS = 32, 40, 12, 48, 8  # noqa: E741
HEADS, KV, DIM = 4, 2, 16  # a head dimension that is not H / HEADS, as Qwen3-30B-A3B drafters have
CONFIG = {
    "hidden_size": H, "intermediate_size": I, "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": DIM,
    "rms_norm_eps": 1e-5, "vocab_size": V, "num_hidden_layers": 1, "max_position_embeddings": 64, "hidden_act": "silu",
}  # fmt: skip
IDS = [0, 1, 3, 4, 8, 9, 10, 20, 21, 30, 38, 39]


def layer_shapes(prefix: str, width: int, sizes=(H, I, HEADS, KV, DIM)) -> dict[str, tuple]:
    h, i, heads, kv, dim = sizes
    return {
        f"{prefix}.self_attn.q_proj.weight": (heads * dim, width),
        f"{prefix}.self_attn.k_proj.weight": (kv * dim, width),
        f"{prefix}.self_attn.v_proj.weight": (kv * dim, width),
        f"{prefix}.self_attn.o_proj.weight": (h, heads * dim),
        f"{prefix}.mlp.gate_proj.weight": (i, h),
        f"{prefix}.mlp.up_proj.weight": (i, h),
        f"{prefix}.mlp.down_proj.weight": (h, i),
        f"{prefix}.post_attention_layernorm.weight": (h,),
    }


def eagle3_shapes(layer: str, h: int = H, u: int = U, sizes=(H, I, HEADS, KV, DIM)) -> dict[str, tuple]:
    return layer_shapes(layer, 2 * h, sizes) | {
        f"{layer}.hidden_norm.weight": (h,),
        f"{layer}.input_layernorm.weight": (h,),
        "fc.weight": (h, 3 * h),
        "norm.weight": (h,),
        "lm_head.weight": (u, h),
    }


def training_names(shapes: dict) -> dict:
    """ModelOpt's, while it trains."""
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
MAPPED = {"draft_vocab_size": U}
# case -> layout, config, names and shapes, maps
PUBLISHED = {
    "EAGLE": ("eagle3", CONFIG | MAPPED, eagle3_shapes("midlayer"), ("d2t", "t2d")),
    "EAGLE, whole vocabulary": ("eagle3", CONFIG, eagle3_shapes("midlayer", u=V), ()),
    "SpecForge with a list": (
        "eagle3",
        CONFIG | MAPPED | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}},
        eagle3_shapes("midlayer"),
        ("d2t", "t2d"),
    ),
    "EAGLE-3.1": (
        "eagle3",
        CONFIG | MAPPED | {"fc_norm": True, "norm_output": True, "norm_output_means": "feedback"},
        eagle3_shapes("midlayer") | {f"fc_norm.{i}.weight": (H,) for i in range(3)},
        ("d2t", "t2d"),
    ),
    "speculators": ("speculators", SPECULATORS, eagle3_shapes("layers.0"), ("d2t", "t2d")),
    "speculators with everything": (
        "speculators",
        SPECULATORS
        | {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
        | {"eagle_aux_hidden_state_layer_ids": [2, 4, 6]},
        eagle3_shapes("layers.0") | {"input_norm.weight": (3 * H,), "embed_tokens.weight": (V, H)},
        ("d2t", "t2d"),
    ),
    "speculators, Qwen3 layer": (
        "speculators",
        SPECULATORS | {"transformer_layer_config": CONFIG | {"model_type": "qwen3"}},
        eagle3_shapes("layers.0")
        | {"layers.0.self_attn.q_norm.weight": (DIM,), "layers.0.self_attn.k_norm.weight": (DIM,)},
        ("d2t", "t2d"),
    ),
    "ModelOpt": ("modelopt", CONFIG | MAPPED, with_biases(eagle3_shapes("layers.0")), ("d2t",)),
    "ModelOpt without a head": ("modelopt", CONFIG, without(eagle3_shapes("layers.0", u=V), "lm_head.weight"), ()),
    "ModelOpt without a head, of a part of the vocabulary": (
        "modelopt", CONFIG | MAPPED, without(eagle3_shapes("layers.0"), "lm_head.weight"), ("d2t",)
    ),
    "ModelOpt, training": (
        "modelopt-training",
        CONFIG | MAPPED | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}},
        training_names(eagle3_shapes("layers.0")),
        ("eagle_module.d2t",),
    ),
    "EAGLE-2 of Llama 2": (
        "eagle", CONFIG, layer_shapes("layers.0", H) | {"fc.weight": (H, 2 * H), "fc.bias": (H,)}, ()
    ),
    "EAGLE-2 of Llama 3": (
        "eagle",
        CONFIG | {"bias": False, "rope_theta": 500000.0},
        layer_shapes("layers.0", H) | {"fc.weight": (H, 2 * H), "embed_tokens.weight": (V, H)},
        (),
    ),
    "EAGLE-2 of speculators": (
        "speculators",
        {"speculators_model_type": "eagle", "fusion_bias": True, **NESTED},
        layer_shapes("transformer", H) | {"fusion_fc.weight": (H, 2 * H), "fusion_fc.bias": (H,)},
        (),
    ),
}  # fmt: skip


def random_tensors(shapes: dict, maps: tuple[str, ...] = (), dtype=torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator).mul(0.3).to(dtype) for name, shape in shapes.items()}
    ids = torch.tensor(IDS)
    values = {"d2t": ids - torch.arange(U), "t2d": torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)}
    return tensors | {name: values[name.split(".")[-1]] for name in maps}


def publish(folder, case: str):
    """Write the checkpoint of a case as its publisher would."""
    _, config, shapes, maps = PUBLISHED[case]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(random_tensors(shapes, maps), folder / "model.safetensors")
    return folder


def make_target(device: str = "cpu", **fields) -> Target:
    config = {
        "layers": LAYERS, "hidden": H, "intermediate": I, "heads": 4, "kv_heads": 2, "head_dim": 8, "vocab": V,
        "eps": 1e-5, "rope": Rope(500000.0), "context": 128, "tied": False,
    } | fields  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        return Target(ModelConfig(**config)).eval()


@pytest.mark.parametrize("case", PUBLISHED)
def test_recognised_and_loaded_strictly(case, tmp_path):
    layout, _, shapes, _ = PUBLISHED[case]
    folder = publish(tmp_path / "it", case)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.layout.name == layout
    drafter = load_drafter(folder, make_target())
    assert drafter.conventions == checkpoint.conventions() == open_checkpoint(folder, headers=True).conventions()
    parameters = sum(p.numel() for p in drafter.parameters())
    held = sum(torch.Size(shape).numel() for name, shape in shapes.items() if name != "embed_tokens.weight")
    assert parameters == held  # every weight has found its place


@pytest.mark.parametrize("case", PUBLISHED)
def test_a_tensor_of_another_name_is_an_error(case):
    _, config, shapes, maps = PUBLISHED[case]
    target = make_target()
    for name in without(shapes, "embed_tokens.weight"):
        tensors = random_tensors(shapes, maps)
        tensors[name + "s"] = tensors.pop(name)
        with pytest.raises(ValueError, match=r"lacks|holds|sets|known layout"):
            load_from(config, tensors, target)


def load_from(config: dict, tensors: dict, target):
    family, layout = recognise(config, tensors, "it")
    return family.construct(*layout.read(config, tensors, "it"), target, "it")


def conversions():
    """Every case with every other layout of its family."""
    for case, (layout, *_) in PUBLISHED.items():
        for other in FAMILIES[(eagle if "EAGLE-2" in case else eagle3).FAMILY]:
            if other.name != layout:
                yield case, other.name


@pytest.mark.parametrize(("case", "to"), conversions())
def test_converted_and_back_bit_for_bit(case, to, tmp_path):
    layout, *_ = PUBLISHED[case]
    source = publish(tmp_path / "source", case)
    needs_head = to == "speculators" or "of a part" in case  # a head of all tokens can be left to the target
    if "without a head" in case and needs_head and not to.startswith("modelopt"):
        with pytest.raises(ValueError, match="no head of its own"):
            convert(source, tmp_path / "there", to)
        return
    convert(source, tmp_path / "there", to)
    there = open_checkpoint(tmp_path / "there")
    assert there.layout.name == to
    assert there.meaning == open_checkpoint(source).meaning
    convert(tmp_path / "there", tmp_path / "back", layout)
    assert open_checkpoint(tmp_path / "back").meaning == there.meaning
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "back"))
    assert set(before) == set(after)
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype
        assert torch.equal(tensor, after[name]), name


def test_real_sizes_of_llama_3_1_8b_on_the_meta_device():
    """yuhuili/EAGLE3-LLaMA3.1-Instruct-8B: its names, shapes and config, against a target of the real size."""
    sizes = (4096, 14336, 32, 8, 128)
    target = make_target(
        "meta", layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256
    )
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 1, "rms_norm_eps": 1e-5,
        "vocab_size": 128256, "draft_vocab_size": 32000, "max_position_embeddings": 2048, "torch_dtype": "float16",
    }  # fmt: skip
    tensors = {
        name: torch.empty(shape, dtype=torch.float16, device="meta")
        for name, shape in eagle3_shapes("midlayer", 4096, 32000, sizes).items()
    }
    ids = torch.arange(32000) * 4
    tensors |= {"d2t": ids - torch.arange(32000), "t2d": torch.zeros(128256, dtype=torch.bool).index_fill(0, ids, True)}
    family, layout = recognise(config, tensors, "llama")
    meaning, found = layout.read(config, tensors, "llama")
    drafter = family.construct(meaning, found, target, "llama")
    assert drafter.taps == (2, 16, 29)
    assert drafter.shape.rope == Rope(10000.0)
    assert sum(p.numel() for p in drafter.parameters()) == 424_689_664  # 0.85 GB in fp16
    for other in FAMILIES[family]:
        spelled_config, spelled = other.write(meaning, found, None)
        again, back = other.read(spelled_config, spelled, "llama")
        assert again == meaning
        assert {n: t.shape for n, t in layout.write(again, back, None)[1].items()} == {
            n: t.shape for n, t in tensors.items()
        }


# The traps of published checkpoints: each test holds the right reading against the wrong one.


def written(folder, config: dict, tensors: dict):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def case(tmp_path):
    """case(name, config, tensors) -> a drafter for `target` from a published checkpoint with changes."""
    counter = iter(range(100))

    def load(name: str, target=None, drop: tuple[str, ...] = (), tensors: dict | None = None, **config):
        _, base, shapes, maps = PUBLISHED[name]
        merged = copy.deepcopy(base) | config
        found = without(random_tensors(shapes, maps) | (tensors or {}), *drop)
        return load_drafter(written(tmp_path / str(next(counter)), merged, found), target or make_target())

    return load


@torch.no_grad()
def logits(drafter, level: int = 0) -> torch.Tensor:
    """At the last of 6 random positions, after `level` further steps of its own."""
    generator = torch.Generator().manual_seed(1)
    feats = torch.randn(1, 6, len(drafter.taps) * H, generator=generator)
    tokens = torch.randint(V, (1, 6), generator=generator)
    return list(drafter.unroll(feats, tokens, level + 1))[-1].logits[0, 3]


def differ(a, b, level: int = 0) -> bool:
    return not torch.allclose(logits(a, level), logits(b, level), atol=1e-3)


def test_q1_a_missing_head_is_refused(case):
    with pytest.raises(ValueError, match=r"lacks the tensor lm_head.weight"):
        case("EAGLE", drop=("lm_head.weight",))


def test_q1_an_eagle3_head_is_not_taken_for_eagle2(case):
    with pytest.raises(ValueError, match="not a drafter of a known layout"):
        case("EAGLE-2 of Llama 2", tensors={"lm_head.weight": torch.zeros(V, H)})


def test_q2_no_rope_in_the_config_is_theta_10000_and_not_the_targets(case):
    target = make_target()
    stated = case("EAGLE", target)
    assert target.config.rope == Rope(500000.0)
    assert stated.shape.rope == Rope(10000.0)
    assert differ(stated, case("EAGLE", target, rope_theta=500000.0))


def test_q2_speculators_leaves_out_what_is_its_classes_default(case):
    nested = {k: v for k, v in NESTED["transformer_layer_config"].items() if k != "rms_norm_eps"}
    assert case("speculators", transformer_layer_config=nested).shape.eps == 1e-6
    bare = {k: v for k, v in nested.items() if k != "max_position_embeddings"} | {"model_type": "qwen3"}
    assert case("speculators, Qwen3 layer", transformer_layer_config=bare).shape.context == 32768


def test_q3_target_ids_in_d2t_are_refused_by_name(case):
    for drop in ((), ("t2d",)):
        with pytest.raises(ValueError, match="look like target ids"):
            case("EAGLE", tensors={"d2t": torch.tensor(IDS)}, drop=drop)
    assert case("EAGLE").vocab.ids.tolist() == IDS


def test_q4_number_of_layers_and_architecture_are_not_believed(case):
    claims = {"num_hidden_layers": 40, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    assert not differ(case("EAGLE"), case("EAGLE", **claims))


@pytest.mark.parametrize(
    ("name", "field", "taps"),
    [
        ("EAGLE", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}}, (2, 4, 6)),
        ("EAGLE", {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}, (1, 3, 5)),
        ("speculators", {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}, (1, 3, 5)),
        ("ModelOpt", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}}, (2, 4, 6)),
        ("EAGLE", {}, (2, 4, 5)),
        ("speculators", {}, (2, 4, 5)),
        ("ModelOpt", {}, (2, 4, 5)),
    ],
)
def test_q5_a_list_of_layers_counts_outputs_or_inputs(case, name, field, taps):
    assert case(name, **field).taps == taps


def test_q6_every_switch_changes_the_forward(case):
    base = "speculators"
    assert differ(case(base), case(base, norm_before_residual=True))
    assert not differ(case(base), case(base, norm_output=True))
    assert differ(case(base), case(base, norm_output=True), level=1)
    norms = {"input_norm.weight": torch.ones(3 * H)}
    assert differ(case(base), case(base, tensors=norms))
    with pytest.raises(ValueError, match="exclude each other"):
        case(base, tensors=norms | {f"fc_norm.{i}.weight": torch.ones(H) for i in range(3)})
    for flag in ("fc_norm", "norm_before_fc"):
        with pytest.raises(ValueError, match=f"sets {flag} to True, but the file lacks"):
            case(base, **{flag: True})


def test_q6_norm_output_means_what_its_origin_means(case):
    assert case("speculators", norm_output=True).how.feedback == "post"
    specforge = case("EAGLE", norm_output=True)
    assert (specforge.how.feedback, specforge.how.head_norm) == ("pre", True)
    off = case("EAGLE", norm_output=False)
    assert (off.how.feedback, off.how.head_norm) == ("pre", False)
    assert differ(specforge, off)
    assert case("EAGLE", norm_output=True, norm_output_means="feedback").how.feedback == "post"
    assert case("speculators", norm_output=True, norm_output_means="head").how.feedback == "pre"


def test_q7_fc_has_a_bias_in_eagle2_unless_the_config_says_no(case):
    with pytest.raises(ValueError, match=r"lacks the tensor fc.bias"):
        case("EAGLE-2 of Llama 2", drop=("fc.bias",))
    with pytest.raises(ValueError, match=r"holds the tensor fc.bias"):
        case("EAGLE-2 of Llama 2", bias=False)
    with pytest.raises(ValueError, match=r"holds the tensor fc.bias"):
        case("EAGLE", tensors={"fc.bias": torch.zeros(H)})


def test_q8_mimo_puts_the_hidden_state_first(tmp_path):
    at = "model.mtp_layers.0"
    shapes = layer_shapes(at, H) | {f"{at}.input_proj.weight": (H, 2 * H)}
    shapes |= {f"{at}.{n}_layernorm.weight": (H,) for n in ("token", "hidden", "input", "final")}
    tensors = random_tensors(shapes)
    mimo = load_drafter(written(tmp_path / "mimo", CONFIG, tensors), make_target())
    others = load_drafter(written(tmp_path / "others", CONFIG | {"mtp": {}}, tensors), make_target())
    assert mimo.how.hidden_first
    assert differ(mimo, others)


def test_q9_an_embedding_in_the_file_is_not_read(case):
    for name in ("EAGLE", "EAGLE-2 of Llama 2"):
        plain, other = case(name), case(name, tensors={"embed_tokens.weight": torch.randn(V, H)})
        assert not differ(plain, other)
        assert other.conventions["embedding"] == "the target's, not the file's"


def test_q10_a_tied_targets_head_is_its_embedding(case):
    target = make_target(tied=True)
    target.head.weight = target.embed.weight
    drafter = case("EAGLE-2 of Llama 2", target)
    assert torch.equal(drafter.head.weight, target.embed.weight)
    headless = case("ModelOpt without a head", target)
    assert torch.equal(headless.head.weight, target.embed.weight)


# Conversions that need the target, or cannot be


@pytest.fixture
def target_folder(tmp_path):
    fields = CONFIG | {"model_type": "llama", "num_hidden_layers": LAYERS, "architectures": ["LlamaForCausalLM"]}
    head = torch.randn(V, H, generator=torch.Generator().manual_seed(3))
    return written(tmp_path / "target", fields, {"model.embed_tokens.weight": head})


def test_a_head_that_is_the_targets_is_copied_on_request(target_folder, tmp_path):
    source = publish(tmp_path / "source", "ModelOpt without a head")
    convert(source, tmp_path / "there", "eagle3", target_folder)
    head = load_file(target_folder / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(load_file(tmp_path / "there" / "model.safetensors")["lm_head.weight"], head.bfloat16())


def test_what_a_layout_cannot_say_is_refused(target_folder, tmp_path):
    source = publish(tmp_path / "source", "EAGLE")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"taps": [2, 4, LAYERS]}))
    for server in ("sglang", "vllm"):
        with pytest.raises(ValueError, match=f"hidden state {LAYERS}"):
            export(source, tmp_path / "there", server, target_folder)
    with pytest.raises(ValueError, match="give --target"):
        export(source, tmp_path / "there", "sglang")
    (source / "config.json").write_text(json.dumps(config | {"norm_output": False}))
    with pytest.raises(ValueError, match="no final norm"):
        export(source, tmp_path / "there", "vllm", target_folder)
    with pytest.raises(ValueError, match="knows no head_norm"):
        export(source, tmp_path / "there", "sglang", target_folder)
    with pytest.raises(ValueError, match="has the layouts"):
        convert(source, tmp_path / "there", "medusa")
    with pytest.raises(ValueError, match="is the checkpoint itself"):
        convert(source, source, "speculators")


def test_exports_hold_no_embedding_but_the_targets_and_name_it(target_folder, tmp_path):
    source = publish(tmp_path / "source", "speculators with everything")
    export(source, tmp_path / "vllm", "vllm", target_folder)
    embedding = load_file(target_folder / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(load_file(tmp_path / "vllm" / "model.safetensors")["embed_tokens.weight"], embedding.bfloat16())
    config = json.loads((tmp_path / "vllm" / "config.json").read_text())
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": str(target_folder),
        "architectures": ["LlamaForCausalLM"],
    }
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 6]
    other = publish(tmp_path / "other", "EAGLE-2 of Llama 3")
    export(other, tmp_path / "sglang", "sglang")
    assert "embed_tokens.weight" not in load_file(tmp_path / "sglang" / "model.safetensors")
    with pytest.raises(ValueError, match="knows no"):
        export(source, tmp_path / "no", "sglang", target_folder)
