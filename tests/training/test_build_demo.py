"""scripts/build_demo.py: a wider target has the logits of the smaller one and learns, and all stages run."""

import json
import sys

import build_demo
import demo_models
import pytest
import torch
from demo_models import grow, grow_drafter, grown_config, narrowed, repeats, unlikelihood
from helpers import SMALL, main_of, run_here, save_hf, tiny_drafter
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.api import load_drafter, load_target
from specdec.drafters import mtp
from specdec.drafters.formats import save_drafter
from specdec.trees import DynamicTree


@pytest.fixture
def small():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMALL, head_dim=8, tie_word_embeddings=True, rms_norm_eps=1e-12))
    with torch.no_grad():
        for name, weight in model.named_parameters():  # norms too, so that none is forgotten
            weight.copy_(torch.rand_like(weight) + 0.5 if "norm" in name else torch.randn_like(weight) * 0.2)
    return model


def test_a_wider_target_has_the_same_logits(small):
    wide = grow(small, grown_config(small.config, 96, 100))
    ids = torch.randint(small.config.vocab_size, (2, 20))
    with torch.no_grad():
        torch.testing.assert_close(wide(ids).logits, small(ids).logits, atol=1e-4, rtol=1e-4)
    assert sum(p.numel() for p in wide.parameters()) > 2 * sum(p.numel() for p in small.parameters())
    assert wide.config.num_attention_heads == 12
    assert wide.config.num_key_value_heads == 4


def test_all_of_it_learns(small):
    """Of two steps, since what is 0 at first hides the parts before it."""
    wide = grow(small, grown_config(small.config, 96, 100))
    before = {name: weight.clone() for name, weight in wide.named_parameters()}
    optimizer = torch.optim.SGD(wide.parameters(), lr=0.1)
    for _ in range(2):
        ids = torch.arange(small.config.vocab_size).view(1, -1)
        wide(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, weight in wide.named_parameters():
        assert (weight != before[name]).any(-1).all(), f"a row of {name} stayed what it was"


@pytest.mark.parametrize("sizes", [(100, 100), (40, 100), (96, 60)])
def test_a_size_that_does_not_fit_is_refused_by_name(small, sizes):
    with pytest.raises(ValueError, match=f"{sizes[0]} and {sizes[1]}"):
        grown_config(small.config, *sizes)


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "mtp", "medusa"])
@torch.no_grad()
def test_a_grown_drafter_drafts_the_same(small, kind, tmp_path):
    wide = grow(small, grown_config(small.config, 96, 100))
    small.save_pretrained(tmp_path / "small")
    wide.save_pretrained(tmp_path / "wide")
    target, larger = (load_target(tmp_path / name, tokenizer=False) for name in ("small", "wide"))
    drafter = tiny_drafter(target, kind=kind)
    save_drafter(drafter, tmp_path / "draft", target)
    grow_drafter(tmp_path / "draft", wide.config, tmp_path / "grown")
    grown = load_drafter(tmp_path / "grown", larger)
    tokens = torch.randint(small.config.vocab_size, (2, 12))
    steps = []
    for model, head in ((target, drafter), (larger, grown)):
        _, feats = model(tokens, None, taps=head.taps, logits=False)
        steps.append([state.logits for state in head.unroll(feats, tokens.roll(-1, 1), 3)])
    assert sum(p.numel() for p in grown.parameters()) > sum(p.numel() for p in drafter.parameters())
    for ours, theirs in zip(*steps, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)


def test_an_mlp_is_cut_to_its_largest_neurons():
    torch.manual_seed(0)
    weights = {f"mlp.{kind}_proj.weight": torch.randn(6, 4) for kind in ("gate", "up")}
    weights["mlp.down_proj.weight"] = torch.randn(4, 6)
    weights["mlp.down_proj.weight"][:, [1, 4]] = 0
    cut = narrowed(weights, 4)
    for name, weight in cut.items():
        assert torch.equal(weight, weights[name][:, [0, 2, 3, 5]] if "down" in name else weights[name][[0, 2, 3, 5]])


def test_repeats_are_found_and_cost_likelihood(small):
    answer = [7, 8, 9, 10, 11, 7, 8, 9, 10, 12]
    assert [i for i, again in enumerate(repeats(answer)) if again] == [8]
    loss = unlikelihood(small, [([1, 2, 3], answer), ([4], [5, 6])])
    logits = small(torch.tensor([[1, 2, 3, *answer]])).logits[0, 3 + 8 - 1]
    torch.testing.assert_close(loss, -torch.log1p(-logits.softmax(-1)[10]))
    assert unlikelihood(small, [([1], [2, 3])]).item() == 0


def test_conversations_worth_learning_are_kept(tmp_path):
    answer = "A tree is a tall plant with a trunk and with branches. It lives for many years."
    talks = [("dolly_1", "What?", answer), ("dolly_2", "Why?", "Short."), ("dolly_3", "Who?", "so it is " * 20),
             ("unknown_1", "How?", answer), ("oasst pythia", "When?", answer)]  # fmt: skip
    said = [[{"from": "human", "value": question}, {"from": "gpt", "value": text}] for _, question, text in talks]
    rows = [{"id": talk[0], "conversations": turns} for talk, turns in zip(talks, said, strict=True)]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train, heldout = build_demo.conversations(tmp_path / "c.jsonl")
    assert [c[0]["content"] for c in train + heldout] == ["What?", "What?"]  # dolly's are used twice


def run(name: str, *words: object) -> None:
    """Stand in for `build_demo.run`: a process of its own takes seconds to start."""
    done = run_here(main_of(name), *map(str, words))
    assert done.returncode == 0, done.stderr


def test_all_stages(target_path, tmp_path, monkeypatch):
    """On a tiny target, with one drafter that grows."""
    tokenizer = load_target(target_path).tokenizer
    small = tmp_path / "small"
    fields = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "max_position_embeddings": 1024}
    save_hf(small / "target", "llama", head=15.0, **fields)
    tokenizer.save_pretrained(small / "target")
    target = load_target(small / "target")
    save_drafter(mtp.create(target), small / "mtp", target)
    answer = "Number {} is a number that is a little larger than {}, and it is smaller than {}. Counting goes on there."
    rows = [
        {"id": "dolly", "conversations": [{"from": "human", "value": f"What is {i}?"},
                                          {"from": "gpt", "value": answer.format(i, i - 1, i + 1)}]}
        for i in range(600)
    ]  # fmt: skip
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    book = {"title": "A", "year": 1900, "text": "It was a long sentence of a long book, which goes on and on. " * 200}
    (tmp_path / "b.jsonl").write_text(json.dumps(book) + "\n")
    (tmp_path / "p.jsonl").write_text(json.dumps({"turns": ["What is 3?"]}) + "\n")
    monkeypatch.setattr(demo_models, "ANSWERS", 1)
    small_sizes = {"GROWN": {"mtp": 64}, "DRAFTERS": ("mtp",), "LENGTH": 128, "MAP_SIZE": 200}
    small_sizes["TREES"] = (DynamicTree(2, 2, 4),)
    for name, value in (small_sizes | {"run": run}).items():
        monkeypatch.setattr(build_demo, name, value)
    words = ["--small", small, "--conversations", tmp_path / "c.jsonl", "--books", tmp_path / "b.jsonl"]
    words += ["--bench", tmp_path / "p.jsonl", "--work", tmp_path / "work", "--out", tmp_path / "demo", "--eager"]
    words += ["--sizes", 96, 100, "--tokens", 1280, "--less-steps", 1, "--answers", 12, "trainer.steps=2"]
    words += ["data.heldout=4", "trainer.batch_tokens=512", "trainer.decode_every=null"]
    monkeypatch.setattr(sys, "argv", ["build_demo.py", *map(str, words)])
    build_demo.main()
    report = json.loads((tmp_path / "demo" / "report.json").read_text())
    assert report["shape"]["hidden"] == 96
    assert report["target"]["tokens"] == 8 * 128
    assert {"before", "after", "steps"} <= set(report["target"])
    assert all(min(drafter["tau"].values()) >= 1 for drafter in report["drafters"].values())
    target = load_target(tmp_path / "demo" / "target")
    load_drafter(tmp_path / "demo" / "mtp", target)
    page = (tmp_path / "demo" / "README.md").read_text()
    assert "| mtp | " in page
    assert "{" not in page
