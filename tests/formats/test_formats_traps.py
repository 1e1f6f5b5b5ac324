"""The traps of published checkpoints: each test holds the right reading against the wrong one."""

import json
from functools import partial

import pytest
import torch
from published import CONFIG, NESTED, H, V, make_target, mtp_shapes, publish, random_tensors, written

from specdec.drafters.formats import load_drafter
from specdec.drafters.formats.convert import export
from specdec.model.rope import Rope

LISTED = {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}


@pytest.fixture
def case(tmp_path):
    """case(name, config, tensors) -> a drafter for `target` from a published checkpoint with changes.

    A tensor of None is left out."""

    def load(name: str, target=None, tensors: dict | None = None, **config):
        def change(found: dict) -> None:
            found.update(tensors or {})
            for key in [key for key, tensor in found.items() if tensor is None]:
                del found[key]

        folder = publish(tmp_path / str(len(list(tmp_path.iterdir()))), name, change, **config)
        return load_drafter(folder, target or make_target())

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


def test_no_rope_in_the_config_is_theta_10000_and_not_the_targets(case):
    target = make_target()
    stated = case("EAGLE", target)
    assert target.config.rope == Rope(500000.0)
    assert stated.shape.rope == Rope(10000.0)
    assert differ(stated, case("EAGLE", target, rope_theta=500000.0))


def test_speculators_leaves_out_what_is_its_classes_default(case):
    nested = {k: v for k, v in NESTED["transformer_layer_config"].items() if k != "rms_norm_eps"}
    assert case("speculators", transformer_layer_config=nested).shape.eps == 1e-6
    bare = {k: v for k, v in nested.items() if k != "max_position_embeddings"} | {"model_type": "qwen3"}
    assert case("speculators, Qwen3 layer", transformer_layer_config=bare).shape.context == 32768


def test_number_of_layers_and_architecture_are_not_believed(case):
    claims = {"num_hidden_layers": 40, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    assert not differ(case("EAGLE"), case("EAGLE", **claims))


@pytest.mark.parametrize(
    ("name", "field", "taps"),
    [
        ("EAGLE", {"eagle_config": LISTED}, (2, 4, 6)),
        ("EAGLE", LISTED, (1, 3, 5)),
        ("speculators", LISTED, (1, 3, 5)),
        ("ModelOpt", {"eagle_config": LISTED}, (2, 4, 6)),
        ("EAGLE", {}, (2, 4, 5)),
        ("speculators", {}, (2, 4, 5)),
        ("ModelOpt", {}, (2, 4, 5)),
    ],
)
def test_a_list_of_layers_counts_outputs_or_inputs(case, name, field, taps):
    assert case(name, **field).taps == taps


def test_every_switch_changes_the_forward(case):
    made = partial(case, "speculators")
    assert differ(made(), made(norm_before_residual=True))
    assert not differ(made(), made(norm_output=True))
    assert differ(made(), made(norm_output=True), level=1)
    norms = {"input_norm.weight": torch.ones(3 * H)}
    assert differ(made(), made(tensors=norms))
    with pytest.raises(ValueError, match="exclude each other"):
        made(tensors=norms | {f"fc_norm.{i}.weight": torch.ones(H) for i in range(3)})
    for flag in ("fc_norm", "norm_before_fc"):
        with pytest.raises(ValueError, match=f"sets {flag} to True, but the file lacks"):
            made(**{flag: True})


def test_norm_output_means_what_its_origin_means(case):
    assert case("speculators", norm_output=True).switches.feedback == "post"
    specforge, off = case("EAGLE", norm_output=True), case("EAGLE", norm_output=False)
    assert (specforge.switches.feedback, specforge.switches.head_norm) == ("pre", True)
    assert (off.switches.feedback, off.switches.head_norm) == ("pre", False)
    assert differ(specforge, off)
    assert case("EAGLE", norm_output=True, norm_output_means="feedback").switches.feedback == "post"
    assert case("speculators", norm_output=True, norm_output_means="head").switches.feedback == "pre"


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("EAGLE-2 of Llama 2", {"tensors": {"fc.bias": None}}, "lacks the tensor fc.bias"),
        ("EAGLE-2 of Llama 2", {"bias": False}, "holds the tensor fc.bias"),
        ("EAGLE", {"tensors": {"fc.bias": torch.zeros(H)}}, "holds the tensor fc.bias"),
        # an EAGLE-3 head is not taken for EAGLE-2
        ("EAGLE-2 of Llama 2", {"tensors": {"lm_head.weight": torch.zeros(V, H)}}, "not a drafter of a known layout"),
    ],
)
def test_fc_has_a_bias_in_eagle2_unless_the_config_says_no(case, name, changes, message):
    with pytest.raises(ValueError, match=message):
        case(name, **changes)


def test_mimo_puts_the_hidden_state_first(tmp_path):
    tensors = random_tensors(mtp_shapes())
    mimo = load_drafter(written(tmp_path / "mimo", CONFIG, tensors), make_target())
    others = load_drafter(written(tmp_path / "others", CONFIG | {"mtp": {}}, tensors), make_target())
    assert mimo.switches.hidden_first
    assert differ(mimo, others)


def test_an_embedding_in_the_file_is_not_read(case):
    for name in ("EAGLE", "EAGLE-2 of Llama 2"):
        plain, other = case(name), case(name, tensors={"embed_tokens.weight": torch.randn(V, H)})
        assert not differ(plain, other)


def test_a_tied_targets_head_is_its_embedding(case):
    target = make_target(tied=True)
    target.head.weight = target.embed.weight
    for name in ("EAGLE-2 of Llama 2", "ModelOpt without a head"):
        assert torch.equal(case(name, target).head.weight, target.embed.weight)


@pytest.mark.parametrize("drafter", ["demo/eagle2", "demo/eagle3"])
@pytest.mark.parametrize(
    ("hidden", "said"),
    [(48, "hidden size is 384, .* is 48"), (384, "vocabulary of 8192, .* is 320")],
)
def test_an_export_refuses_a_target_of_another_size(tmp_path, drafter, hidden, said):
    config = {"num_hidden_layers": 8, "hidden_size": hidden, "vocab_size": 320}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"{drafter}: the drafter.*{said}: give the target that it was trained for"):
        export(drafter, tmp_path / "out", "vllm", tmp_path)
    assert not (tmp_path / "out").exists()
