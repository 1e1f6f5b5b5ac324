"""What is written for vLLM is what vLLM reads: its arithmetic, written out here, gives from the file what our drafter
gives. `scripts/check_in_vllm.py` tries the same in vLLM itself."""

import json
import shlex
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import edit_config, edit_tensors, save_hf, tiny_target
from published import make_target, publish
from safetensors.torch import load_file

import specdec
from specdec.acceptance import FILE, read_acceptance
from specdec.drafters import dflash, eagle, eagle3, medusa, mtp, pard, peagle
from specdec.drafters.formats import FAMILIES, load_drafter, open_checkpoint, save_drafter
from specdec.drafters.formats.convert import convert, export, read_facts, start_command, without_a_form
from specdec.drafters.formats.vllm import notes
from specdec.drafters.vocab import DraftVocab
from specdec.model.loader import load_target
from specdec.training.train import warn_of_servers

LAYERS = 6


FIELDS = {"llama": {}, "gemma3_text": {"head_dim": 8}, "mixtral": {"num_local_experts": 4}}


@pytest.fixture(scope="module", params=FIELDS)
def pair(request, tmp_path_factory):
    """A target's folder, the target, and transformers' model of it."""
    folder = tmp_path_factory.mktemp(request.param) / "target"
    model = save_hf(folder, request.param, num_hidden_layers=LAYERS, **FIELDS[request.param])
    return folder, load_target(folder, tokenizer=False), model


@torch.no_grad()
def randomized(drafter):
    torch.manual_seed(3)
    for parameter in drafter.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.2)
    return drafter.eval()


def written(drafter, target, tmp_path, target_folder):
    """Config and tensors of a drafter's export for vLLM."""
    save_drafter(drafter, tmp_path / "ours", target)
    export(tmp_path / "ours", tmp_path / "vllm", "vllm", target_folder)
    config = json.loads((tmp_path / "vllm" / "config.json").read_text())
    return config, load_file(tmp_path / "vllm" / "model.safetensors")


@torch.no_grad()
def states_of(model, tokens):
    """What vLLM gathers under the names 0 to N: what enters the layers, and what leaves the last one, not normed."""
    states = []
    with ExitStack() as hooks:
        for module in (*model.model.layers, model.model.norm):
            hook = module.register_forward_pre_hook(lambda module, args: states.append(args[0]))
            hooks.callback(hook.remove)
        model(tokens)
    return states


def fused_in_vllm(config, tensors, states):
    """`combine_hidden_states` of vLLM's Eagle3LlamaForCausalLM, over states gathered in ascending order."""
    eps, ids = config["transformer_layer_config"]["rms_norm_eps"], config["eagle_aux_hidden_state_layer_ids"]
    feats = torch.cat([states[i] for i in sorted(set(ids))], dim=-1)
    if config["norm_before_fc"]:
        feats = F.rms_norm(feats, feats.shape[-1:], tensors["input_norm.weight"], eps)
    if config["fc_norm"]:
        norms = torch.stack([tensors[f"fc_norm.{i}.weight"] for i in range(len(ids))])
        feats = feats.unflatten(-1, norms.shape)
        feats = (F.rms_norm(feats, feats.shape[-1:], eps=eps) * norms).flatten(-2)
    return feats @ tensors["fc.weight"].T


def test_the_last_state_of_a_target_whose_final_norm_is_not_known_is_refused(tmp_path):
    save_hf(tmp_path / "target", "olmo2")
    drafter = eagle3.create(load_target(tmp_path / "target", tokenizer=False), taps=(1, 2, 3), tap_norms=True)
    message = rf"{tmp_path / 'target'}: .* head work is not known \(train with drafter.taps from 1 to 2\)"
    with pytest.raises(ValueError, match=message):
        written(drafter, None, tmp_path, tmp_path / "target")


HEADS = {
    "taps listed": {"taps": (1, 3, 5)},
    "taps out of order": {"taps": (5, 1, 3)},
    "taps out of order, a norm for each": {"taps": (5, 1, 3), "tap_norms": True},
    "taps out of order, one norm": {"taps": (5, 1, 3), "input_norm": True},
    "two taps": {"taps": (1, 4)},
    "embeddings": {"taps": (0, 2, 4)},
    "the last state": {"taps": (1, 3, LAYERS), "tap_norms": True},
    "the last state first": {"taps": (LAYERS, 1, 3), "tap_norms": True, "feedback": "post"},
}


@pytest.mark.parametrize("kind", HEADS)
@torch.no_grad()
def test_vllm_fuses_what_it_gathers_as_we_do(kind, pair, tmp_path):
    folder, target, model = pair
    drafter = randomized(eagle3.create(target, init="random", **HEADS[kind]))
    config, tensors = written(drafter, target, tmp_path, folder)
    tokens = torch.randint(target.vocab, (1, 20))
    theirs = fused_in_vllm(config, tensors, states_of(model, tokens))
    again = load_drafter(tmp_path / "vllm", target)
    assert again.switches == drafter.switches
    assert again.taps == tuple(sorted(drafter.taps))
    for ours in (drafter, again):
        _, feats = target(tokens, None, taps=ours.taps, logits=False)
        torch.testing.assert_close(ours.fuse(feats), theirs, rtol=1e-3, atol=1e-4)
    count = config["transformer_layer_config"].get("num_aux_hidden_states", 3)
    assert tensors["fc.weight"].shape[1] == count * target.config.hidden


@torch.no_grad()
def test_a_bias_of_fc_goes_into_an_embedding_of_the_heads_own(pair, tmp_path):
    folder, target, _ = pair
    drafter = randomized(eagle.create(target, init="random"))
    _, tensors = written(eagle.create(target, fc_bias=False), target, tmp_path, folder)
    assert "embed_tokens.weight" not in tensors, "without a bias it shares the target's"
    config, tensors = written(drafter, target, tmp_path, folder)
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["bias"], config["attention_bias"], config["qkv_bias"]) == (False, False, False)
    assert "fc.bias" not in tensors
    tokens, hidden = torch.randint(target.vocab, (1, 20)), torch.randn(1, 20, target.config.hidden)
    theirs = torch.cat([F.embedding(tokens, tensors["embed_tokens.weight"]), hidden], dim=-1) @ tensors["fc.weight"].T
    ours = drafter.fc(torch.cat([F.embedding(tokens, drafter.embedding), hidden], dim=-1))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    again = load_drafter(tmp_path / "vllm", target)
    assert again.conventions["embedding"] == "its own"
    save_drafter(again, tmp_path / "saved", target)
    assert torch.equal(load_drafter(tmp_path / "saved", target).embedding, again.embedding)
    following = torch.randint(target.vocab, (1, 20))
    steps = [head.double().unroll(hidden.double(), following, 3) for head in (drafter, again)]
    for one, other in zip(*steps, strict=True):  # in fp64, as each step magnifies the rounding of the one before
        torch.testing.assert_close(one.logits, other.logits, rtol=1e-4, atol=1e-4)
    for to, name in ((export, "sglang"), (convert, "speculators")):
        with pytest.raises(ValueError, match=r"embedding"):
            to(tmp_path / "vllm", tmp_path / "no", name)


@pytest.mark.parametrize(("blocks", "own"), [(1, False), (2, False), (1, True)])
def test_medusa_in_the_words_of_vllm(blocks, own, pair, tmp_path):
    folder, target, _ = pair
    drafter = randomized(medusa.create(target, heads=3, blocks=blocks, own_heads=own))
    config, tensors = written(drafter, target, tmp_path, folder)
    assert (config["num_heads"], config["num_hidden_layers"]) == (3, blocks)
    assert config["medusa_fc_bias"] is True
    assert config["original_lm_head"] is not own
    assert notes(config) == ["vLLM decodes with Medusa heads up to version 0.32 only"]
    assert ("lm_heads.0.weight" in tensors) != own
    assert own or torch.equal(tensors["lm_heads.0.weight"], target.head.weight)
    again = load_drafter(tmp_path / "vllm", target)
    assert all(torch.equal(a, b) for a, b in zip(drafter.parameters(), again.parameters(), strict=True))
    hidden = torch.randn(1, 4, target.config.hidden)
    for one, other in zip(drafter.unroll(hidden, None, 3), again.unroll(hidden, None, 3), strict=True):
        assert torch.equal(one.logits, other.logits)


def test_biases_of_the_attention_leave_none_undefined(pair, tmp_path):
    """vLLM and transformers give the projection after the attention a bias too, which they would leave undefined."""
    folder, target, _ = pair
    drafter = randomized(eagle3.create(target, init="random", qkv_bias=True, taps=(1, 3, 5)))
    bias = written(drafter, target, tmp_path, folder)[1]["layers.0.self_attn.o_proj.bias"]
    assert not bias.any()
    again = load_drafter(tmp_path / "vllm", target)
    assert all(torch.equal(a, b) for a, b in zip(drafter.parameters(), again.parameters(), strict=True))
    edit_tensors(tmp_path / "vllm", **{"layers.0.self_attn.o_proj.bias": bias + 1})
    with pytest.raises(ValueError, match=r"holds the tensor .*o_proj.bias"):
        load_drafter(tmp_path / "vllm", target)


def test_a_head_in_fp8_gets_no_rounded_copy_of_the_target(pair, tmp_path):
    folder, target, _ = pair
    save_drafter(eagle3.create(target, init="random", taps=(1, 3, 5)), tmp_path / "ours", target)
    held = load_file(tmp_path / "ours" / "model.safetensors")
    rounded = {name: t.to(torch.float8_e4m3fn) for name, t in held.items() if t.is_floating_point()}
    edit_tensors(tmp_path / "ours", **rounded)
    export(tmp_path / "ours", tmp_path / "vllm", "vllm", folder)
    tensors = load_file(tmp_path / "vllm" / "model.safetensors")
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(tensors["embed_tokens.weight"], embedding.bfloat16())
    assert torch.equal(tensors["fc.weight"], rounded["fc.weight"].bfloat16())


# What others read otherwise is written out, or said


def test_what_others_would_guess_is_written(pair, tmp_path):
    """Both counts of the layers, and `norm_before_residual` though it is off."""
    folder, target, _ = pair
    save_drafter(eagle3.create(target, taps=(5, 1, 3)), tmp_path / "ours", target)
    for layout in ("specdec", "speculators", "modelopt", "eagle3"):
        convert(tmp_path / "ours", tmp_path / layout, layout, folder)
        config = json.loads((tmp_path / layout / "config.json").read_text())
        assert config["norm_before_residual"] is False
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]  # vLLM: what enters these layers
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 4]  # SGLang: what leaves these
    assert load_drafter(tmp_path / "eagle3", target).taps == (1, 3, 5)


def test_doubts_are_said(tmp_path):
    folder = publish(tmp_path / "it", "speculators")
    (doubt,) = open_checkpoint(folder, headers=True).doubts
    assert "norm_before_residual is absent" in doubt
    with pytest.warns(UserWarning, match="norm_before_residual is absent"):
        load_drafter(folder, make_target())
    edit_config(folder, norm_before_residual=False, eagle_aux_hidden_state_layer_ids=[4, 2, 6])
    checkpoint = open_checkpoint(folder, headers=True)
    assert checkpoint.conventions()["doubts"].startswith("the taps are read in the order listed, [4, 2, 6]")
    edit_config(folder, eagle_aux_hidden_state_layer_ids=[2, 4, 6])
    assert open_checkpoint(folder, headers=True).doubts == ()


def test_taps_that_are_listed_need_the_target(pair, tmp_path):
    """Without it, a tap without a name was not reported, and with it that was refused."""
    folder, target, _ = pair
    save_drafter(eagle3.create(target, taps=(1, 3, LAYERS)), tmp_path / "ours", target)
    for layout in ("eagle3", "speculators", "modelopt", "modelopt-training"):
        with pytest.raises(ValueError, match="give --target"):
            convert(tmp_path / "ours", tmp_path / "there", layout)
        with pytest.raises(ValueError, match=f"hidden state {LAYERS}"):
            convert(tmp_path / "ours", tmp_path / "there", layout, folder)
    with pytest.raises(ValueError, match=r"train with drafter.tap_norms=true"):
        export(tmp_path / "ours", tmp_path / "there", "vllm", folder)


@pytest.mark.parametrize(
    ("family", "depth"),
    [
        ("llama", {"num_hidden_layers": 7}),
        ("gpt2", {"n_layer": 7}),
        ("xglm", {"num_layers": 7}),
        ("nemotron_h", {"layers_block_type": ["mamba", "attention", "mlp", "mamba", "mlp", "mamba", "attention"]}),
    ],
)
def test_the_depth_of_a_target_has_several_names(family, depth, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family} | depth))
    assert read_facts(tmp_path).layers == 7


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("opt", {"ffn_dim": 80, "word_embed_proj_dim": 48}),
        ("gpt2", {"n_embd": 48, "n_layer": 3, "n_head": 6}),  # its head is its embedding
        ("gpt_neox", {}),
    ],
)
def test_the_ends_of_a_target_have_several_names(family, fields, tmp_path):
    folder = tmp_path / "target"
    save_hf(folder, family, **fields)
    target = load_target(folder, tokenizer=False)
    drafter = randomized(eagle3.create(target, taps=(1, 2)))
    assert "vllm" not in without_a_form(drafter, target)
    _, tensors = written(drafter, target, tmp_path, folder)
    assert tensors["embed_tokens.weight"].equal(target.embed.weight)
    facts = read_facts(folder)
    assert facts.part("head").equal(target.head.weight)


@pytest.mark.parametrize("name", ["eagle3", "eagle2"])
def test_measured_acceptance_goes_along(name, tmp_path):
    source = specdec.DEMO_TARGET.parent / name
    export(source, tmp_path / "vllm", "vllm", specdec.DEMO_TARGET)
    assert read_acceptance(tmp_path / "vllm") == read_acceptance(source) is not None
    to = open_checkpoint(source, headers=True).family.saved_as
    convert(tmp_path / "vllm", tmp_path / "back", to)
    assert (tmp_path / "back" / FILE).read_text() == (tmp_path / "vllm" / FILE).read_text()
    (tmp_path / "vllm" / FILE).unlink()
    convert(tmp_path / "vllm", tmp_path / "again", to)
    assert not (tmp_path / "again" / FILE).exists()


# What is about to be trained


TAPS, LAST, FEW = {"taps": (1, 3, 5)}, {"taps": (1, 3, LAYERS)}, {"vocab": 9}
# What is trained -> why SGLang, and why vLLM could not load it; None: the server can.
ABOUT_TO_BE_TRAINED = [
    (eagle3, TAPS | FEW, None, None),
    (eagle3, TAPS | FEW | {"train_head": False}, None, None),
    (eagle3, TAPS | {"tap_norms": True, "feedback": "post"}, None, None),
    (eagle3, {"taps": (1, 2, 3, 4, 5)}, None, None),
    (eagle3, {"taps": (3,)}, "drafter.taps=3", None),
    (eagle3, LAST, "drafter.taps from 1", "drafter.tap_norms=true"),
    (eagle3, LAST | {"tap_norms": True}, "drafter.taps from 1", None),
    (eagle3, TAPS | {"head_norm": False}, "drafter.head_norm=true", "drafter.head_norm=true"),
    (eagle, {}, None, None),
    (eagle, FEW, None, "drafter.draft_vocab_size=null"),
    (medusa, {}, "drafter=eagle3", None),
    (medusa, FEW, "drafter=eagle3", "drafter.draft_vocab_size=null"),
    (mtp, {}, "drafter=eagle3", "drafter=eagle3"),
    (peagle, TAPS | {"layers": 2}, "not P-EAGLE", None),
    (peagle, TAPS | {"layers": 2, "tap_norms": True}, "not P-EAGLE", "drafter.tap_norms=false"),
    (pard, {"layers": 1}, "not PARD", None),
    (pard, {"layers": 1, "taps": (1,)}, "not PARD", "drafter.taps=null"),
]


@pytest.mark.parametrize(("family", "how", "sglang", "vllm"), ABOUT_TO_BE_TRAINED)
def test_training_says_at_its_start_which_servers_could_not_load_the_drafter(
    pair, capsys, tmp_path, family, how, sglang, vllm
):
    """What it says is what `export` does."""
    folder, target, _ = pair
    vocab = DraftVocab(target.vocab, torch.arange(how["vocab"])) if "vocab" in how else None
    drafter = family.create(target, **how | {"vocab": vocab})
    reasons = without_a_form(drafter, target)
    warn_of_servers(drafter, target)
    said = capsys.readouterr().out
    assert said.count("\n") == bool(reasons)
    save_drafter(drafter, tmp_path / "it", target)
    for server, expected in (("vllm", vllm), ("sglang", sglang)):
        assert (server in reasons) == (expected is not None)
        if expected is None:
            export(tmp_path / "it", tmp_path / server, server, folder)
            continue
        assert expected in reasons[server]
        assert expected in said
        with pytest.raises(ValueError, match=r".") as refused:
            export(tmp_path / "it", tmp_path / server, server, folder)
        assert str(refused.value).split(": ")[0] in reasons[server]


# What starts a server with an export: as `scripts/check_in_vllm.py` starts vLLM's engine, and by SGLang's flags

# How a drafter that is not bundled is made, vLLM's method and number of tokens (heads of Medusa, slots of a block), and
# SGLang's algorithm.
BLOCK = partial(dflash.create, layers=1, taps=2)
MARKOV = {"label": "p+k+1", "conditional": "markov", "rank": 4, "confidence": True}
STARTED = {
    "eagle3": (None, "eagle3", 3, "EAGLE3"),
    "eagle2": (None, "eagle", 3, "EAGLE"),
    "medusa": (partial(medusa.create, heads=3), "medusa", 3, None),
    "dflash": (partial(BLOCK, block_size=6), "dflash", 5, "DFLASH"),
    "dspark": (partial(BLOCK, block_size=5, **MARKOV), "dspark", 5, "DSPARK"),
}


@pytest.mark.parametrize("name", STARTED)
def test_what_starts_a_server(name, tmp_path):
    (make, method, count, algorithm), folder = STARTED[name], tmp_path / "a head"
    place = specdec.DEMO_TARGET.parent / name
    if make is not None:
        save_drafter(make(target := tiny_target()), place := tmp_path / name, target)
    checkpoint = open_checkpoint(place)
    words = shlex.split(start_command("vllm", checkpoint, folder, "some/target"))
    assert words[:4] == ["vllm", "serve", "some/target", "--speculative-config"]
    assert json.loads(words[4]) == {"method": method, "num_speculative_tokens": count, "model": str(folder)}
    said = start_command("sglang", checkpoint, folder, "T")
    if algorithm is None:
        assert said is None
        return
    words = shlex.split(said)
    assert words[:5] == ["python", "-m", "sglang.launch_server", "--model-path", "T"]
    assert words[5:9] == ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(folder)]
    flags = dict(zip(words[9::2], words[10::2], strict=True))
    steps, tokens = (flags.get(f"--speculative-num-{what}") for what in ("steps", "draft-tokens"))
    assert (steps, tokens) == (("3", "4") if name.startswith("eagle") else (None, None))  # a block says it itself


def test_vllm_gets_the_mask_rows(tmp_path):
    families = {family.title: family for family in FAMILIES}
    for title, method in ("P-EAGLE", "eagle3"), ("PARD", "draft_model"):
        head = SimpleNamespace(family=families[title], meaning=None)
        config = json.loads(shlex.split(start_command("vllm", head, tmp_path, "T"))[4])
        assert (config["method"], config["parallel_drafting"]) == (method, True)
    assert all(bool(family.method) == ("vllm" in family.servers) for family in FAMILIES)


def test_sglang_gets_the_tokens_that_a_head_proposes(tmp_path):
    """They are a list in a pickle in the head's folder, which a later export of all tokens removes."""
    target, there = tiny_target(), tmp_path / "there"
    for ids in ([5, 2, 9, 11], None):
        some = DraftVocab(target.vocab, ids and torch.tensor(ids))
        save_drafter(eagle.create(target, vocab=some), tmp_path / "saved", target)
        words = shlex.split(start_command("sglang", export(tmp_path / "saved", there, "sglang"), there, "some/target"))
        assert ("--speculative-token-map" in words) == (there / "token_map.pt").exists() == (ids is not None)
        if ids is not None:
            assert words[-2:] == ["--speculative-token-map", str(there / "token_map.pt")]
            assert torch.load(there / "token_map.pt", weights_only=True) == ids
