"""MTP heads against independent statements of their formulas, and against transformers' own."""

from types import SimpleNamespace

import pytest
import torch
from golden_blocks import absorb, drafted
from helpers import edit_config, edit_tensors, save_hf, texts_of, tiny_drafter, tiny_target
from torch import nn
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3NextConfig
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextDecoderLayer,
    Qwen3NextRMSNorm,
    Qwen3NextRotaryEmbedding,
)

from specdec import Engine, load_target
from specdec.drafters import mtp
from specdec.drafters.formats import as_saved, load_drafter, mtp_inside, save_drafter
from specdec.drafters.formats.mtp import FAMILY, NAMES
from specdec.model.rope import Rope
from specdec.trees import Chain, DynamicTree

H, V, LAYERS = 48, 61, 2
CONFIG = {
    "hidden_size": H, "intermediate_size": 80, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8,
    "rms_norm_eps": 1e-5, "vocab_size": V, "num_hidden_layers": LAYERS, "rope_theta": 10000.0,
}  # fmt: skip


MIMO = "model.mtp_layers.0"


def stand_in(embed: torch.Tensor, head: torch.Tensor):
    """Of the target an MTP head needs its size, its embedding and its head only."""
    config = SimpleNamespace(layers=LAYERS, hidden=H, vocab=V, rope=Rope())
    embed, head = (SimpleNamespace(weight=w.detach()) for w in (embed, head))
    return SimpleNamespace(config=config, embed=embed, head=head, vocab=V, device=embed.weight.device)


def build(config: dict, tensors: dict[str, torch.Tensor], target):
    """The MTP heads that a target's checkpoint holds."""
    layout = next(one for one in mtp_inside.LAYOUTS if any(one.wants(config, name) for name in tensors))
    wanted = {name: tensor for name, tensor in tensors.items() if layout.wants(config, name)}
    return FAMILY.construct(*layout.read(config, wanted, "it"), target, "it")


def glm():
    fields = CONFIG | {
        "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2,
        "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7, "use_qk_norm": True, "attention_bias": True,
        "partial_rotary_factor": 0.5, "num_nextn_predict_layers": 1,
    }  # fmt: skip
    return Glm4MoeForCausalLM(Glm4MoeConfig(**fields))


def qwen2():
    model = Qwen2ForCausalLM(Qwen2Config(**{k: v for k, v in CONFIG.items() if k != "head_dim"}))
    model.config.num_mtp_layers = 1
    model.config.mtp_layer_types = ["full_attention"]
    return model


@torch.no_grad()
def mtp_head(main) -> MtpModel:
    """transformers' head for this target. Its experts come uninitialised, so everything is filled here."""
    head = MtpModel(main, 1).eval()
    for name, parameter in head.layers.named_parameters():
        parameter.copy_(torch.rand_like(parameter) + 0.5 if parameter.ndim == 1 else torch.randn_like(parameter) * 0.3)
        if name.endswith("bias"):
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    for name, buffer in head.layers.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn_like(buffer) * 0.3)
    return head


def one_by_one(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """Each expert by itself, as checkpoints store them; any other tensor as it is."""
    stem, _, kind = name.rpartition("experts.")
    if kind == "down_proj":
        return {f"{stem}experts.{i}.down_proj.weight": w for i, w in enumerate(value)}
    if kind == "gate_up_proj":
        halves = [(i, *expert.chunk(2)) for i, expert in enumerate(value)]
        gates = {f"{stem}experts.{i}.gate_proj.weight": gate for i, gate, _ in halves}
        return gates | {f"{stem}experts.{i}.up_proj.weight": up for i, _, up in halves}
    return {name: value}


def published(model: MtpModel) -> dict[str, torch.Tensor]:
    """The head's tensors under the names of a GLM-4.5 checkpoint."""
    out = {}
    for name, value in model.layers[0].state_dict().items():
        name = f"model.layers.{LAYERS}.{name.removeprefix('mtp_block.')}".replace("post_norm.", "shared_head.norm.")
        out |= one_by_one(name, value)
    return out


@pytest.mark.parametrize("make", [glm, qwen2])
@torch.no_grad()
def test_drafts_equal_those_of_transformers(make):
    """Prefill and three more rounds of a growing text: the same logits, so the same drafted token."""
    torch.manual_seed(0)
    main = make().eval()
    theirs = mtp_head(main)
    target = stand_in(main.get_input_embeddings().weight, main.lm_head.weight)
    drafter = build(main.config.to_dict(), published(theirs), target).eval()
    feats, tokens = torch.randn(1, 14, H), torch.randint(V, (1, 14))
    cache = MtpCache(config=main.config.get_mtp_config())
    done = 0
    for count in (7, 3, 1, 3):
        piece = slice(done, done + count)
        positions = torch.arange(done + 1, done + count + 1)[None]
        mask = torch.ones(1, count, dtype=torch.int64)  # transformers 5.17 does not make one
        token, logits, _ = theirs(tokens[:, piece], feats[:, piece], mask, positions, cache)
        state = absorb(drafter, feats[:, piece], tokens[:, piece], done)
        done += count
        torch.testing.assert_close(state.logits, logits, rtol=1e-4, atol=1e-4)
        assert drafted(drafter, state, 2)[0][0] == token[0, 0]


@torch.no_grad()
def test_mimo_puts_the_hidden_state_first():
    """The head that transformers' drafts are compared with, under MiMo's names and with the projection's halves
    exchanged, computes the same. In the order of everybody else it does not."""
    torch.manual_seed(0)
    main = qwen2().eval()
    target = stand_in(main.get_input_embeddings().weight, main.lm_head.weight)
    theirs = {name.removeprefix(f"model.layers.{LAYERS}."): w for name, w in published(mtp_head(main)).items()}
    names = {theirs: NAMES[part] for part, theirs in mtp_inside.KINDS["deepseek"][2].items()}
    mimo = {f"{MIMO}.{names.get(n.removesuffix('.weight'), n)}": w for n, w in theirs.items()}
    mimo = {n if n.endswith((".weight", ".bias")) else f"{n}.weight": w for n, w in mimo.items()}
    project = f"{MIMO}.input_proj.weight"
    swapped = mimo | {project: torch.cat(mimo[project].chunk(2, 1)[::-1], 1)}
    feats, tokens = torch.randn(1, 9, H), torch.randint(V, (1, 9))
    states = []
    for tensors in ({f"model.layers.{LAYERS}.{name}": w for name, w in theirs.items()}, swapped, mimo):
        states.append(absorb(build(main.config.to_dict(), tensors, target), feats, tokens).hidden)
    torch.testing.assert_close(states[1], states[0], rtol=1e-4, atol=1e-4)
    assert (states[2] - states[0]).abs().max() > 0.1


@pytest.mark.parametrize("dense", [False, True])
@torch.no_grad()
def test_qwen3_next_head_equals_its_layer(dense):
    """Zero-centred norms, an output gate, a quarter of each head rotated, a gated shared expert."""
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        **CONFIG | {"num_hidden_layers": 1}, partial_rotary_factor=0.5, layer_types=["full_attention"], num_experts=6,
        num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=24, norm_topk_prob=True,
        mlp_only_layers=[0] if dense else [], decoder_sparse_step=1, attn_implementation="eager",
    )  # fmt: skip
    names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    head = nn.ModuleDict({name: Qwen3NextRMSNorm(H, eps=1e-5) for name in names})
    head["fc"] = nn.Linear(2 * H, H, bias=False)
    head["layers"] = nn.ModuleList([Qwen3NextDecoderLayer(config, 0)])
    for parameter in head.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.3)
    tensors = {}
    for name, value in head.state_dict().items():
        tensors |= one_by_one(f"mtp.{name}", value)
    embed = torch.randn(V, H)
    target = stand_in(embed, torch.randn(V, H))
    drafter = build(config.to_dict() | CONFIG, tensors, target)
    feats, tokens = torch.randn(1, 9, H), torch.randint(V, (1, 9))
    x = [head["pre_fc_norm_embedding"](embed[tokens]), head["pre_fc_norm_hidden"](feats)]
    rope = Qwen3NextRotaryEmbedding(config)(feats, torch.arange(9)[None])
    mask = torch.zeros(1, 1, 9, 9).masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
    expected = head["norm"](head["layers"][0](head["fc"](torch.cat(x, -1)), rope, attention_mask=mask))
    hidden = absorb(drafter, feats, tokens).hidden
    torch.testing.assert_close(hidden[0, 0], expected[0, -1], rtol=1e-4, atol=1e-4)
    layout, config, tensors = as_saved(drafter)
    again = FAMILY.construct(*layout.read(config, tensors, "it"), target, "it")
    assert torch.equal(absorb(again, feats, tokens).hidden, hidden)


def mimo_folder(folder):
    """A small target of MiMo's family with its head, whose layer is the target's first one, as one checkpoint."""
    model = save_hf(folder, "qwen2", hidden_size=H, vocab_size=V, num_hidden_layers=LAYERS)
    edit_config(folder, model_type="mimo", architectures=["MiMoForCausalLM"], num_nextn_predict_layers=1)
    head = {n: torch.rand(H) + 0.5 for n in ("token_layernorm", "hidden_layernorm", "final_layernorm")}
    head["input_proj"] = torch.randn(H, 2 * H) * 0.2
    layer = {f"{MIMO}.{name}": weight for name, weight in model.model.layers[0].state_dict().items()}
    edit_tensors(folder, **layer, **{f"{MIMO}.{n}.weight": w for n, w in head.items()})


def glm_folder(folder):
    """A small GLM-4.5, whose target runs through transformers' modules, with its head."""
    main = glm()
    main.save_pretrained(folder)
    edit_tensors(folder, **{name: value.contiguous().clone() for name, value in published(mtp_head(main)).items()})


@pytest.mark.parametrize("feedback", [None, "pre"])
@pytest.mark.parametrize("make", [mimo_folder, glm_folder])
def test_a_target_drafts_with_its_own_head(make, feedback, tmp_path):
    """One folder is target and drafter, the text is plain decoding's, and the head can be saved in its own folder."""
    torch.manual_seed(0)
    make(tmp_path / "model")
    target = load_target(tmp_path / "model", tokenizer=False)
    drafter = load_drafter(tmp_path / "model", target, feedback=feedback)
    assert drafter.switches.feedback == (feedback or "post")
    assert drafter.switches.hidden_first == (make is mimo_folder)
    engines = (Engine(target, *parts) for parts in ((), (drafter, Chain(3)), (drafter, DynamicTree(3, 3, 9))))
    plain, chain, tree = (texts_of(engine, [[3, 5, 7], [1, 2]], max_new_tokens=30) for engine in engines)
    assert plain == chain == tree
    save_drafter(drafter, tmp_path / "head", target)
    again = load_drafter(tmp_path / "head", target)
    assert again.switches == drafter.switches
    assert all(map(torch.equal, again.parameters(), drafter.parameters()))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["model.mtp_layers.0.fc", "model.mtp_layers.1.fc"], "it has 2 MTP layers, each trained on the output of the"),
        ([f"model.layers.{LAYERS}.self_attn.kv_a_proj_with_mqa.weight"], "MLA"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(names, message):
    with pytest.raises(ValueError, match=message):
        build(CONFIG, dict.fromkeys(names, torch.zeros(4, H)), stand_in(torch.zeros(V, H), torch.zeros(V, H)))


def test_the_blank_first_embedding_is_that_of_position_0_alone():
    drafter = tiny_drafter(tiny_target(), kind="mtp")
    tokens, positions = torch.tensor([[3, 5, 7]]), torch.tensor([[0, 1, 2]])
    plain = drafter.embed(tokens, positions)
    drafter.switches = drafter.switches.__class__(blank_first=True)
    blank = drafter.embed(tokens, positions)
    assert not blank[:, 0].any()
    assert torch.equal(blank[:, 1:], plain[:, 1:])
    assert plain.abs().sum(-1).all()


@pytest.mark.parametrize("hidden_first", [False, True])
def test_a_fresh_head_passes_the_hidden_state_through(hidden_first):
    """It has no bias, and its projection is [0, I], or [I, 0]."""
    drafter = mtp.create(tiny_target(), hidden_first=hidden_first)
    assert not [name for name, _ in drafter.named_parameters() if "bias" in name]
    halves = drafter.blocks[0].project.weight.detach().chunk(2, 1)
    passed, blank = halves if hidden_first else halves[::-1]
    assert torch.equal(passed, torch.eye(len(passed)))
    assert not blank.any()
