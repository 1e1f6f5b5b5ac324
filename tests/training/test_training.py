"""The command that trains: data and masks, a run that learns, the published layout, mistakes."""

import json
import lzma
import shutil

import pytest
import torch
from helpers import run_here
from omegaconf import OmegaConf
from safetensors.torch import load_file
from short_runs import CONF, CONVERSATIONS, SMALL

from specdec.drafters.formats import load_drafter, save_drafter
from specdec.drafters.vocab import DraftVocab, most_frequent
from specdec.model.loader import load_target
from specdec.training.data import Batches, count_tokens, read_conversations, tokenise
from specdec.training.train import build_drafter
from specdec.training.train import main as train_main


def train(where, out, *overrides: str):
    """The command in this process: its last line, parsed, or what it ended with."""
    done = run_here(train_main, *SMALL, *where, f"out={out}", *overrides)
    return done if done.returncode else json.loads(done.stdout.strip().split("\n")[-1])


def refused(where, out, *overrides: str) -> str:
    """The one sentence that the command says about wrong settings."""
    done = train(where, out, *overrides)
    assert done.returncode == 2, done.stderr
    *warnings, last = done.stderr.strip().split("\n")
    assert last.startswith("error: ")
    assert all(line.startswith("warning: ") for line in warnings)
    return last


@pytest.fixture(scope="module")
def short_run(where, tmp_path_factory):
    """The folder of a run of two steps, to be copied."""
    out = tmp_path_factory.mktemp("short") / "run"
    assert train(where, out, "trainer.steps=2")["step"] == 2
    return out


def test_mask_covers_what_the_assistant_says(target_path):
    """By the markers of the template, and without them by what a message adds."""
    tokenizer = load_target(target_path).tokenizer
    conversation = [*CONVERSATIONS[0], *CONVERSATIONS[1]]
    (sample,) = tokenise(tokenizer, [conversation], 500)
    assert tokenizer.decode(sample.ids[sample.mask]) == "It is 0.<|end|>It is 1.<|end|>"
    assert tokenizer.decode(sample.ids) == tokenizer.apply_chat_template(conversation, tokenize=False)
    assert len(tokenise(tokenizer, [conversation], 5)) == 0, "nothing to learn within 5 tokens"
    tokenizer.chat_template = tokenizer.chat_template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    (unmarked,) = tokenise(tokenizer, [conversation], 500)
    assert unmarked.ids.tolist() == sample.ids.tolist()
    assert unmarked.mask.tolist() == sample.mask.tolist()


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.jsonl.xz"])
def test_sharegpt_and_openai_forms(tmp_path, name):
    sharegpt = {"id": "1", "conversations": [{"from": "human", "value": "a\u2028b"}, {"from": "gpt", "value": "c"}]}
    openai = {"messages": [{"role": "user", "content": "a\u2028b"}, {"role": "assistant", "content": "c"}]}
    rows = [sharegpt, openai]
    text = json.dumps(rows) if name == "a.json" else "\n".join(json.dumps(r, ensure_ascii=False) for r in rows)
    (lzma.open if name.endswith("xz") else open)(tmp_path / name, "wt", encoding="utf-8").write(text)
    first, second = read_conversations(tmp_path / name)
    assert first == second == openai["messages"]


def test_batches_are_deterministic_and_hold_every_sample(target_path):
    samples = tokenise(load_target(target_path).tokenizer, CONVERSATIONS, 100)
    batches = Batches(samples, batch_tokens=128, seed=3)
    epoch = batches.epoch(0)
    assert sorted(i for b in epoch for i in b) == list(range(len(samples)))
    assert epoch == Batches(samples, 128, 3).epoch(0) != batches.epoch(1)
    assert all(batches.collate(b).tokens.numel() <= 128 for b in epoch)
    run = batches.iterate()
    first = [next(run).tokens for _ in range(len(epoch) + 5)]
    assert torch.equal(next(batches.iterate(skip=len(epoch) + 3)).tokens, first[len(epoch) + 3])


def test_draft_vocabulary_is_the_most_frequent_tokens(target_path):
    samples = tokenise(load_target(target_path).tokenizer, CONVERSATIONS, 100)
    counts = count_tokens(samples, 400)
    assert counts.sum() == sum(int(s.mask.sum()) for s in samples)
    vocab = most_frequent(counts, 5)
    assert counts[vocab.ids].min() >= counts.sort(descending=True).values[4]
    assert vocab.ids.tolist() == sorted(vocab.ids.tolist())
    for ids, message in (([0, 10], "from 0 to 9"), ([1, 1], "twice")):
        with pytest.raises(ValueError, match=message):
            DraftVocab(10, torch.tensor(ids))


def test_a_run_learns_and_leaves_a_drafter_that_loads(where, target_path, tmp_path):
    """In a folder in which another was refused before."""
    refused(where, tmp_path / "run", "drafter.taps=[1,2,9]")
    result = train(where, tmp_path / "run", "trainer.steps=60", "trainer.save_every=60")
    losses = [
        row["loss"]
        for row in map(json.loads, (tmp_path / "run" / "log.jsonl").read_text().splitlines())
        if row["split"] == "train"
    ]
    assert losses[-1] < 0.97 * losses[0]  # most of the loss is the random target's own entropy
    assert len(result["accuracy"]) == 3
    assert (tmp_path / "run" / "config.yaml").exists()
    target = load_target(target_path)
    drafter = load_drafter(tmp_path / "run" / "draft", target)
    assert drafter.vocab.size == 200
    names = set(load_file(tmp_path / "run" / "draft" / "model.safetensors"))
    assert {"midlayer.self_attn.q_proj.weight", "midlayer.hidden_norm.weight", "fc.weight", "d2t", "t2d"} <= names
    assert not any("embed" in name for name in names)
    save_drafter(drafter, tmp_path / "again", target)
    again = load_drafter(tmp_path / "again", target)
    assert (drafter.taps, drafter.shape, drafter.vocab.ids.tolist()) == (
        again.taps,
        again.shape,
        again.vocab.ids.tolist(),
    )
    for (name, a), b in zip(drafter.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.path=null"], "no training data: give data.path=FILE"),
        (["data.path=/no/such"], "no such data file"),
        (["target.path=/no/such"], "no such checkpoint folder"),
        (["out=/proc/nowhere"], "cannot write to /proc/nowhere"),
        (["resume=true"], "nothing to resume"),
        (["data.heldout=60"], "of which data.heldout=60 are held out"),
        (["objective.steps=0"], "objective.steps must be at least 1"),
        (["drafter.num_attention_heads=5", "drafter.num_key_value_heads=2"], "5 attention heads cannot share 2"),
        (["trainer.steps=0"], "trainer.steps must be at least 1"),
        (["trainer.schedule=exponential"], "schedule must be"),
        (["drafter.taps=[1,2,9]"], "taps hidden state 9"),
        (["drafter.init=zeros"], "init must be"),
        (["trainer.stepz=3"], "Could not override 'trainer.stepz'. There is trainer.steps"),
        (["qqq=3"], "Could not override 'qqq'. specdec train --help lists all"),
        (["+trainer.stepz=3"], "there is no setting trainer.stepz; there is trainer.steps"),
        (["objective=nothing"], "Could not find 'objective/nothing'. There is block, eagle, "),
        (["objective.mean=none"], "mean must be 'masked' or 'all'"),
    ],
)
def test_mistakes_are_one_sentence(where, tmp_path, overrides, message):
    assert message in refused(where, tmp_path / "run", *overrides)


@pytest.mark.parametrize("name", ["ngram", "ngram_suffix", "draft_model"])
def test_drafters_that_do_not_learn_are_refused(target_path, name):
    config = OmegaConf.load(CONF / "drafter" / f"{name}.yaml")
    if name == "draft_model":
        config.path = str(target_path)
    with pytest.raises(ValueError, match=rf"{config._target_} makes a drafter that does not learn"):
        build_drafter(config, load_target(target_path), [], seed=0)


@pytest.mark.parametrize("change", ["drafter.taps=[0,1,3]", "drafter.rope_theta=500.0", "drafter.draft_vocab_size=100"])
def test_another_drafters_run_is_not_resumed(short_run, where, tmp_path, change):
    shutil.copytree(short_run, tmp_path / "run")
    said = refused(where, tmp_path / "run", "trainer.steps=2", "resume=true", change)
    assert f"holds a run of other settings: {change.split('=')[0]} was" in said
    (tmp_path / "run" / "config.yaml").unlink()  # then the checkpoint itself tells
    said = refused(where, tmp_path / "run", "trainer.steps=4", "resume=true", change)
    assert "belongs to another drafter" in said
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_a_damaged_state_is_named(where, tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "step-00000002.pt").write_bytes(b"no zip")
    assert "damaged or not ours" in refused(where, tmp_path / "run", "resume=true")


def test_saving_never_deletes_a_stranger(target_path, drafter_path, tmp_path):
    target = load_target(target_path)
    (tmp_path / "precious.txt").write_text("x")
    with pytest.raises(ValueError, match=r"holds precious.txt"):
        save_drafter(load_drafter(drafter_path, target), tmp_path, target)
    assert (tmp_path / "precious.txt").read_text() == "x"


def test_a_second_run_does_not_overwrite_the_first(short_run, where):
    before = (short_run / "log.jsonl").read_text()
    assert "holds a run already" in refused(where, short_run, "trainer.steps=2")
    assert (short_run / "log.jsonl").read_text() == before
