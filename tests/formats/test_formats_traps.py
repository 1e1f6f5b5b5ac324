"""The traps of published checkpoints: each test holds the right reading against the wrong one."""

import copy

import pytest
import torch
from published import (
    CONFIG,
    IDS,
    NESTED,
    PUBLISHED,
    H,
    V,
    layer_shapes,
    make_target,
    random_tensors,
    without,
    written,
)

from specdec.drafters.formats import load_drafter
from specdec.model.rope import Rope


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
    """A drafter's logits at the last of 6 random positions, after `level` further steps of its own."""
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
    assert case("speculators", norm_output=True).switches.feedback == "post"
    specforge = case("EAGLE", norm_output=True)
    assert (specforge.switches.feedback, specforge.switches.head_norm) == ("pre", True)
    off = case("EAGLE", norm_output=False)
    assert (off.switches.feedback, off.switches.head_norm) == ("pre", False)
    assert differ(specforge, off)
    assert case("EAGLE", norm_output=True, norm_output_means="feedback").switches.feedback == "post"
    assert case("speculators", norm_output=True, norm_output_means="head").switches.feedback == "pre"


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
    assert mimo.switches.hidden_first
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
