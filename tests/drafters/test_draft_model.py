"""A small model as drafter: its own positions and cache, recognition on disk, and what is refused."""

import json
import shutil

import pytest
import torch
from helpers import save_hf, texts_of, tiny_target
from safetensors.torch import load_file, save_file

from specdec import Engine, Sampling, load_drafter, load_target
from specdec.drafters import draft_model
from specdec.drafters.draft_model import DraftModel
from specdec.trees import Chain, DynamicTree, StaticTree

NONE = frozenset()
LAYERS = ["sliding_attention", "sliding_attention", "full_attention"]
PROMPTS = [[3, 5, 7], [1], [2, 4, 6, 8, 10, 12, 14, 16, 1]]


@pytest.mark.parametrize("kind", ["our decoder", "transformers", "sliding windows"])
def test_the_target_as_its_own_drafter_is_always_right(kind, target_path, tmp_path):
    """Any slip of position, slot or mask would cost acceptance. Rows are ragged, and one of a single token. Windows are
    shorter than the text."""
    target = tiny_target()
    if kind == "transformers":
        target = load_target(target_path, generic=True, tokenizer=False)
    elif kind == "sliding windows":
        save_hf(tmp_path / "model", "gemma3_text", head_dim=8, sliding_window=16, layer_types=LAYERS, vocab_size=17)
        target = load_target(tmp_path / "model", tokenizer=False)
    bushy = StaticTree([[0], [1], [0, 0], [1, 0], [0, 1], [0, 0, 0], [0, 1, 0], [0, 0, 0, 0], [0, 1, 0, 0]])
    for policy in (Chain(4), bushy):
        rows = Engine(target, DraftModel(target), policy).generate(PROMPTS, max_new_tokens=41, eos=NONE).rows
        assert all(accepted == 4 for row in rows for accepted in row.trace.accepted)
        (row,) = Engine(target, DraftModel(target), policy).generate(PROMPTS[1:2], max_new_tokens=41, eos=NONE).rows
        assert row.trace.accepted == [4] * 8


@pytest.fixture
def target(target_path):
    return load_target(target_path)


def test_a_language_model_on_disk_is_recognised(target, target_path, tmp_path):
    """With the target's tokenizer, with none, and for a target that has none. It takes the target's dtype."""
    save_hf(tmp_path / "small", "qwen3", vocab_size=target.config.vocab, num_hidden_layers=1, head_dim=8)
    drafter = load_drafter(tmp_path / "small", target)
    assert isinstance(drafter, DraftModel)
    assert len(drafter.model.blocks) == 1
    assert isinstance(load_drafter(target_path, target), DraftModel)
    for how, dtype in (({"tokenizer": False}, torch.float32), ({"dtype": "bf16"}, torch.bfloat16)):
        other = load_drafter(target_path, load_target(target_path, **how))
        assert isinstance(other, DraftModel)
        assert {p.dtype for p in other.parameters()} == {dtype}
    prompt = target.tokenizer("The quick brown")["input_ids"]
    fast = texts_of(Engine(target, drafter, DynamicTree()), [prompt], max_new_tokens=30)
    assert fast == texts_of(Engine(target), [prompt], max_new_tokens=30)


def test_a_model_whose_config_names_its_depth_otherwise_has_no_heads_inside(target, tmp_path):
    sizes = {"d_model": 48, "ffn_dim": 80, "attention_heads": 6, "num_layers": 2}
    save_hf(tmp_path, "xglm", vocab_size=target.config.vocab, **sizes)
    assert isinstance(load_drafter(tmp_path, target), DraftModel)


@pytest.mark.parametrize(
    ("architecture", "tensor", "is_one"),
    [
        ("Qwen2ForCausalLM", "model.embed_tokens.weight", True),
        ("OPTForCausalLM", "model.decoder.embed_tokens.weight", True),
        ("GPT2LMHeadModel", "wte.weight", True),  # as the hub's file names it
        ("GPTNeoXForCausalLM", "gpt_neox.embed_in.weight", True),
        ("FalconForCausalLM", "transformer.word_embeddings.weight", True),
        ("MambaForCausalLM", "backbone.embeddings.weight", True),
        ("LlamaForCausalLM", "embed_tokens.weight", False),  # EAGLE-1/2
        ("LlamaForCausalLMEagle3", "model.embed_tokens.weight", False),
        ("LlamaModel", "model.embed_tokens.weight", False),
    ],
)
def test_heads_are_not_taken_for_language_models(architecture, tensor, is_one):
    config, tensors = {"architectures": [architecture]}, {tensor: torch.zeros(1)}
    assert draft_model.is_language_model(config, tensors) == is_one


def test_another_vocabulary_is_refused(target, tmp_path):
    save_hf(tmp_path / "other", "llama", vocab_size=target.config.vocab + 1)
    with pytest.raises(ValueError, match=r"vocabulary of \d+, the target one of \d+; they may differ"):
        load_drafter(tmp_path / "other", target)
    with pytest.raises(ValueError, match="a checkpoint of its own: give its folder or hub name"):
        draft_model.create(target, path=None)


def test_weights_that_are_not_finite_are_refused(target_path, tmp_path):
    shutil.copytree(target_path, tmp_path / "bad")
    file = next((tmp_path / "bad").glob("*.safetensors"))
    tensors = load_file(file)
    tensors["lm_head.weight"][0, 0] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lm_head\.weight holds 1 NaN among"):
        draft_model.create(load_target(target_path, tokenizer=False), path=tmp_path / "bad")


@pytest.mark.parametrize(("own", "drafts"), [(0, 8), (8, 0), (24, 8)])
@pytest.mark.parametrize("temperature", [0, 1.3])
def test_vocabularies_that_are_padded_differently_work(target_path, tmp_path, own, drafts, temperature):
    """The models share the ids of the tokenizer: text is the target's, and no draft is one of the padding."""
    tokens = len(load_target(target_path).tokenizer)
    for name, more, seed in (("target", own, 0), ("draft", drafts, 1)):
        save_hf(tmp_path / name, "llama", vocab_size=tokens + more, seed=seed)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(target_path / file, tmp_path / name)
    target = load_target(tmp_path / "target")
    drafter = load_drafter(tmp_path / "draft", target)
    assert drafter.vocab.size == min(tokens + own, tokens + drafts)
    how = {"max_new_tokens": 30, "seed": 4, "sampling": Sampling(temperature)}
    prompts = [target.tokenizer("The quick brown")["input_ids"], [tokens + own - 1, 5]]  # an id of the padding too
    assert texts_of(Engine(target, drafter, DynamicTree()), prompts, **how) == texts_of(Engine(target), prompts, **how)


def test_another_tokenizer_is_refused(target, target_path, tmp_path):
    shutil.copytree(target_path, tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    a, b = [token for token, i in vocab.items() if i in (100, 101)]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="tokenizer names tokens differently from the target's"):
        load_drafter(tmp_path / "other", target)
