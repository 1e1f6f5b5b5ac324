"""The trainer: data and masks, a run that learns, exact resume, the published layout, mistakes."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import run_here
from omegaconf import OmegaConf
from safetensors.torch import load_file

from specdec.drafters.formats import load_drafter, save_drafter
from specdec.drafters.vocab import DraftVocab, most_frequent
from specdec.model.loader import load_target
from specdec.training.data import Batches, count_tokens, read_conversations, tokenise
from specdec.training.regenerate import main as regenerate_main
from specdec.training.train import build_drafter
from specdec.training.train import main as train_main

CONF = Path(__file__).parents[2] / "conf"
CONVERSATIONS = [
    [{"role": "user", "content": f"What is {a} + {b}?"}, {"role": "assistant", "content": f"It is {a + b}."}]
    for a in range(10)
    for b in range(6)
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    path.write_text("".join(json.dumps({"messages": c}) + "\n" for c in CONVERSATIONS))
    return path


def settings(target_path, data, out, *overrides) -> list[str]:
    return [
        f"target.path={target_path}", f"data.path={data}", f"out={out}", "drafter.draft_vocab_size=200",
        "data.heldout=8", "trainer.batch_tokens=256", "trainer.steps=20", "trainer.log_every=5", "objective.steps=3",
        "trainer.prompts=null", *overrides,
    ]  # fmt: skip


def train(*args):
    """Run the command itself in a process of its own; returns its last line, parsed."""
    command = [sys.executable, "-m", "specdec.training.train", *settings(*args)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return done
    return json.loads(done.stdout.strip().split("\n")[-1])


def refused(*args) -> str:
    """The one sentence that the command says about wrong settings."""
    done = run_here(train_main, *settings(*args))
    assert done.returncode == 2, done.stderr
    *warnings, last = done.stderr.strip().split("\n")
    assert last.startswith("error: ")
    assert all(line.startswith("warning: ") for line in warnings)
    return last


@pytest.fixture(scope="module")
def short_run(target_path, data, tmp_path_factory):
    """The folder of a run of two steps, to be copied."""
    out = tmp_path_factory.mktemp("short") / "run"
    done = run_here(train_main, *settings(target_path, data, out, "trainer.steps=2"))
    assert done.returncode == 0, done.stderr
    return out


def test_mask_covers_what_the_assistant_says(target_path):
    tokenizer = load_target(target_path).tokenizer
    conversation = [*CONVERSATIONS[0], *CONVERSATIONS[1]]
    (sample,) = tokenise(tokenizer, [conversation], 500)
    assert tokenizer.decode(sample.ids[sample.mask]) == "It is 0.<|end|>It is 1.<|end|>"
    assert tokenizer.decode(sample.ids) == tokenizer.apply_chat_template(conversation, tokenize=False)
    assert len(tokenise(tokenizer, [conversation], 5)) == 0, "nothing to learn within 5 tokens"


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.jsonl.xz"])
def test_sharegpt_and_openai_forms(tmp_path, name):
    import lzma

    sharegpt = {"id": "1", "conversations": [{"from": "human", "value": "a\u2028b"}, {"from": "gpt", "value": "c"}]}
    openai = {"messages": [{"role": "user", "content": "a\u2028b"}, {"role": "assistant", "content": "c"}]}
    rows = [sharegpt, openai]
    text = json.dumps(rows) if name == "a.json" else "\n".join(json.dumps(r, ensure_ascii=False) for r in rows)
    (lzma.open if name.endswith("xz") else open)(tmp_path / name, "wt", encoding="utf-8").write(text)
    first, second = read_conversations(tmp_path / name)
    assert first == second == openai["messages"]


def test_without_markers_the_mask_is_what_a_message_adds(target_path):
    tokenizer = load_target(target_path).tokenizer
    conversation = [*CONVERSATIONS[0], *CONVERSATIONS[1]]
    (marked,) = tokenise(tokenizer, [conversation], 500)
    tokenizer.chat_template = tokenizer.chat_template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    (unmarked,) = tokenise(tokenizer, [conversation], 500)
    assert unmarked.ids.tolist() == marked.ids.tolist()
    assert unmarked.mask.tolist() == marked.mask.tolist()
    tokenizer.chat_template = "{% for m in messages %}{{ loop.revindex }}{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match="rewrites earlier text"):
        tokenise(tokenizer, [conversation], 500)


def test_batches_are_deterministic_and_hold_every_sample(target_path):
    samples = tokenise(load_target(target_path).tokenizer, CONVERSATIONS, 100)
    batches = Batches(samples, batch_tokens=128, seed=3)
    epoch = batches.epoch(0)
    assert sorted(i for b in epoch for i in b) == list(range(len(samples)))
    assert epoch == Batches(samples, 128, 3).epoch(0) != batches.epoch(1)
    assert all(batches.collate(b).tokens.numel() <= 128 for b in epoch)
    run = batches.iterate()
    first = [next(run).tokens for _ in range(len(epoch) + 5)]
    again = batches.iterate(skip=len(epoch) + 3)
    assert torch.equal(next(again).tokens, first[len(epoch) + 3])


def test_draft_vocabulary_is_the_most_frequent_tokens(target_path):
    samples = tokenise(load_target(target_path).tokenizer, CONVERSATIONS, 100)
    counts = count_tokens(samples, 400)
    assert counts.sum() == sum(int(s.mask.sum()) for s in samples)
    vocab = most_frequent(counts, 5)
    assert counts[vocab.ids].min() >= counts.sort(descending=True).values[4]
    assert vocab.ids.tolist() == sorted(vocab.ids.tolist())


def test_a_run_learns_and_leaves_a_drafter_that_loads(target_path, data, tmp_path):
    result = train(target_path, data, tmp_path / "run", "trainer.steps=60")
    rows = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    losses = [r["loss"] for r in rows if r["split"] == "train"]
    assert losses[-1] < 0.97 * losses[0]  # most of the loss is the random target's own entropy
    assert len(result["accuracy"]) == 3
    assert (tmp_path / "run" / "config.yaml").exists()
    drafter = load_drafter(tmp_path / "run" / "draft", load_target(target_path))
    assert drafter.vocab.size == 200
    names = set(load_file(tmp_path / "run" / "draft" / "model.safetensors"))
    assert {"midlayer.self_attn.q_proj.weight", "midlayer.hidden_norm.weight", "fc.weight", "d2t", "t2d"} <= names
    assert not any("embed" in name for name in names)


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(target_path, data, tmp_path):
    """With Muon; short runs in one process do without (`short_runs.check_resumed`)."""
    optimizer = "trainer.muon_lr=0.02"
    whole = train(target_path, data, tmp_path / "whole", optimizer)
    script = (
        "import os, sys, specdec.training.loop.trainer as t\n"
        "save = t.Trainer.save\n"
        "def save_and_die(self):\n    save(self)\n    os._exit(9)\n"
        "t.Trainer.save = save_and_die\n"
        "from specdec.training.train import main\nmain()\n"
    )
    out = tmp_path / "cut"
    command = [
        sys.executable, "-c", script, f"target.path={target_path}", f"data.path={data}", f"out={out}",
        "drafter.draft_vocab_size=200", "data.heldout=8", "trainer.batch_tokens=256", "trainer.steps=20",
        "trainer.log_every=5", "objective.steps=3", "trainer.prompts=null", "trainer.save_every=9", optimizer,
        "hydra.run.dir=.",
        "hydra/job_logging=none", "--config-path", str(CONF), "--config-name", "train",
    ]  # fmt: skip
    assert subprocess.run(command, capture_output=True, check=False).returncode == 9
    resumed = train(target_path, data, out, "resume=true", optimizer)
    a, b = (load_file(folder / "draft" / "model.safetensors") for folder in (tmp_path / "whole", out))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert resumed["losses"] == whole["losses"]


def test_saved_and_loaded_drafters_are_the_same(target_path, drafter_path, tmp_path):
    target = load_target(target_path)
    first = load_drafter(drafter_path, target)
    save_drafter(first, tmp_path / "again", target)
    second = load_drafter(tmp_path / "again", target)
    assert first.taps == second.taps
    assert first.shape == second.shape
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert torch.equal(first.vocab.ids, second.vocab.ids)


def test_vocabularies_refuse_nonsense():
    for ids, message in (([0, 10], "from 0 to 9"), ([1, 1], "twice")):
        with pytest.raises(ValueError, match=message):
            DraftVocab(10, torch.tensor(ids))


def test_regenerate_answers_every_prompt(target_path, data, tmp_path):
    out = tmp_path / "answers.jsonl"
    regenerate_main(
        [
            "--target",
            str(target_path),
            "--prompts",
            str(data),
            "--out",
            str(out),
            "--max-new-tokens",
            "8",
            "--batch-size",
            "7",
        ]
    )
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(r["messages"][0]["content"] for r in rows) == sorted(c[0]["content"] for c in CONVERSATIONS)
    assert all(r["messages"][-1]["role"] == "assistant" for r in rows)


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
def test_mistakes_are_one_sentence(target_path, data, tmp_path, overrides, message):
    assert message in refused(target_path, data, tmp_path / "run", *overrides)


@pytest.mark.parametrize("name", ["ngram", "ngram_suffix", "draft_model"])
def test_drafters_that_do_not_learn_are_refused(target_path, name):
    config = OmegaConf.load(CONF / "drafter" / f"{name}.yaml")
    if name == "draft_model":
        config.path = str(target_path)
    with pytest.raises(ValueError, match=rf"{config._target_} makes a drafter that does not learn"):
        build_drafter(config, load_target(target_path), [], seed=0)


def test_a_mistake_does_not_lock_the_folder(target_path, data, tmp_path):
    refused(target_path, data, tmp_path / "run", "drafter.taps=[1,2,9]")
    assert train(target_path, data, tmp_path / "run", "trainer.steps=2")["step"] == 2


@pytest.mark.parametrize("change", ["drafter.taps=[0,1,3]", "drafter.rope_theta=500.0", "drafter.draft_vocab_size=100"])
def test_another_drafters_run_is_not_resumed(short_run, target_path, data, tmp_path, change):
    shutil.copytree(short_run, tmp_path / "run")
    said = refused(target_path, data, tmp_path / "run", "resume=true", change)
    assert f"holds a run of other settings: {change.split('=')[0]} was" in said
    (tmp_path / "run" / "config.yaml").unlink()  # then the checkpoint itself tells
    said = refused(target_path, data, tmp_path / "run", "trainer.steps=4", "resume=true", change)
    assert "belongs to another drafter" in said
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_a_damaged_state_is_named(target_path, data, tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "step-00000002.pt").write_bytes(b"no zip")
    assert "damaged or not ours" in refused(target_path, data, tmp_path / "run", "resume=true")


def test_saving_never_deletes_a_stranger(target_path, drafter_path, tmp_path):
    target = load_target(target_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "precious.txt").write_text("x")
    with pytest.raises(ValueError, match=r"holds precious.txt"):
        save_drafter(load_drafter(drafter_path, target), tmp_path / "models", target)
    assert (tmp_path / "models" / "precious.txt").read_text() == "x"


def test_a_second_run_does_not_overwrite_the_first(short_run, target_path, data):
    before = (short_run / "log.jsonl").read_text()
    assert "holds a run already" in refused(target_path, data, short_run, "trainer.steps=2")
    assert (short_run / "log.jsonl").read_text() == before
