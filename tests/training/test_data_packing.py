"""Packed rows: every conversation has the features, losses and gradients that it has alone."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import LEARNERS, save_hf, tiny_drafter, tiny_target
from short_runs import composed

from specdec.model.loader import load_target
from specdec.model.target import Target
from specdec.training.data import Batches, Sample
from specdec.training.features.online import online_features
from specdec.training.loop.evaluate import expected_tau
from specdec.training.loop.parallel import Processes
from specdec.training.objectives.eagle import EagleObjective
from specdec.training.objectives.eagle3 import Eagle3Objective
from specdec.training.objectives.tokens import TokensObjective
from specdec.training.train import assemble

STEPS = 3


def samples(vocab: int, count: int = 12) -> list[Sample]:
    """Conversations of 9 to 20 tokens, prompts longer than an objective looks ahead, and a plain text at the end."""
    rng = np.random.default_rng(0)
    found = []
    for i in range(count):
        length, prompt = 9 + (5 * i) % 12, 5 + i % 3
        mask = np.arange(length) >= (0 if i == count - 1 else prompt)
        found.append(Sample(rng.integers(0, vocab, length).astype(np.int32), mask))
    return found


def families(tmp_path):
    yield "native", tiny_target()
    sliding = replace(tiny_target().config, sliding=(False, True, True), window=4)
    torch.manual_seed(0)
    yield "native with windows", Target(sliding).eval()
    for family in ("gpt2", "starcoder2"):  # by transformers' modules: learned positions; a window
        fields = {"gpt2": {"n_embd": 48, "n_layer": 3, "n_head": 6}, "starcoder2": {"sliding_window": 4}}[family]
        save_hf(tmp_path / family, family, vocab_size=17, **fields)
        yield family, load_target(tmp_path / family)


def test_no_conversation_of_a_row_sees_another(tmp_path):
    data = samples(17)
    batches = Batches(data, 200, 0, pack=50, lookahead=STEPS + 1)
    batch = batches.collate(batches.epoch(0)[0])
    assert (batch.documents.amax(1) >= 2).all(), "rows that hold several, and padding"
    for name, target in families(tmp_path):
        taps = (0, 2, 3)
        logits, feats = target(batch.tokens, None, taps=taps, documents=batch.documents)
        mixed, _ = target(batch.tokens, None)
        apart = 0.0
        for row in range(len(batch.tokens)):
            for document in range(batch.documents[row].max()):
                here = batch.documents[row] == document
                alone, alone_feats = target(batch.tokens[row, here][None], None, taps=taps)
                torch.testing.assert_close(logits[row, here], alone[0], rtol=0, atol=1e-5, msg=f"{name} {document}")
                torch.testing.assert_close(feats[row, here], alone_feats[0], rtol=0, atol=1e-5, msg=name)
                apart = max(apart, (mixed[row, here] - alone[0]).abs().max().item())
        assert apart > 1e-3, f"{name}: without documents nothing differs, so the test shows nothing"


def test_held_out_texts_have_the_expected_tau_of_each_alone(target_path, tmp_path):
    """The chain reads further on than this objective does, and every token of a plain text is learnt."""
    (file := tmp_path / "texts.jsonl").write_text(
        "".join(f'{{"text": "{"a tree is green " * n}"}}\n' for n in range(1, 9))
    )
    found = []
    for pack in ("null", "128"):
        words = f"data.path={file}", f"data.pack={pack}", "data.heldout=6", "objective=mtp", "objective.steps=1"
        words += "drafter=mtp", f"target.path={target_path}", f"out={tmp_path / 'run'}"
        run = assemble(composed("train", *words, "trainer.decode_steps=4"), Processes())
        batches = [run.heldout.collate(indices) for indices in run.heldout.epoch(0)]
        features = (run._features(run.drafter, batch) for batch in batches)
        found.append(sum(expected_tau(run.drafter, **f, steps=run.config.decode_steps) for f in features))
    torch.testing.assert_close(*found)


OBJECTIVES = {
    "eagle3": lambda: Eagle3Objective(steps=STEPS),
    "eagle": lambda: EagleObjective(noise=0.0, steps=STEPS),
    "mtp": lambda: TokensObjective(steps=STEPS),
    "medusa": lambda: TokensObjective(steps=STEPS),
}


def loss_and_gradients(target, drafter, objective, batch):
    features = online_features(target, batch, drafter.taps, nullcontext())
    drafter.documents = batch.documents
    drafter.zero_grad()
    loss, metrics = objective(drafter, **features)
    loss.backward()
    return loss, metrics, {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", LEARNERS)
def test_packed_rows_give_the_losses_and_gradients_of_separate_ones(kind):
    target, data = tiny_target(), samples(17)
    drafter, objective = tiny_drafter(target, kind=kind), OBJECTIVES[kind.split("-")[0]]()
    packed = Batches(data, 120, 0, pack=60, lookahead=STEPS + 1)
    indices = next(batch for batch in packed.epoch(0) if len(data) - 1 in batch)  # the plain text is in it
    together = packed.collate(indices)
    assert together.tokens.shape[0] == 2 < len(indices)
    found = loss_and_gradients(target, drafter, objective, together)
    wanted = loss_and_gradients(target, drafter, objective, Batches(data, 120, 0).collate(indices))
    for ours, theirs, rtol, atol in zip(found, wanted, (1e-5, 1e-5, 1e-4), (0, 1e-6, 1e-6), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)
    together.documents = None
    assert abs(loss_and_gradients(target, drafter, objective, together)[0] - wanted[0]) > 1e-3 * wanted[0]


@pytest.mark.parametrize("pack", [None, 60])
def test_batches_are_deterministic_hold_every_sample_and_resume(pack):
    data = samples(17, 40)
    batches = Batches(data, 180, 3, pack, lookahead=4)
    epoch = batches.epoch(0)
    assert sorted(i for batch in epoch for i in batch) == list(range(40))
    assert epoch == Batches(data, 180, 3, pack, 4).epoch(0) != batches.epoch(1)
    for indices in epoch:
        batch = batches.collate(indices)
        assert batch.tokens.numel() <= 180
        if pack is not None:
            assert batch.tokens.shape[1] <= pack
            rows, places = range(len(batch.tokens)), range(9)
            held = [batch.tokens[row, batch.documents[row] == place].tolist() for row in rows for place in places]
            assert sorted(h for h in held if any(h)) == sorted(data[i].ids.tolist() for i in indices)
    whole = batches.iterate()
    wanted = [next(whole) for _ in range(len(epoch) + 3)][-1]
    assert torch.equal(next(batches.iterate(skip=len(epoch) + 2)).tokens, wanted.tokens)


def test_a_packed_row_must_hold_the_longest_conversation():
    with pytest.raises(ValueError, match=r"data.pack=19 is shorter than the longest conversation of 20 tokens"):
        Batches(samples(17), 100, 0, pack=19)
    with pytest.raises(ValueError, match=r"data.pack must lie between 1 and trainer.batch_tokens=100, got 101"):
        Batches(samples(17), 100, 0, pack=101)
