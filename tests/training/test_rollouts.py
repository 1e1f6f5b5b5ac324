"""On-policy data: the weights are what the rounds say, batches take their share, a run resumes bit for bit."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import short_runs
import torch
import torch.nn.functional as F
from helpers import LEARNERS, tiny_drafter, tiny_target
from short_runs import assert_goes_on, batch, composed, refused, samples

from specdec.api import DEMO_TARGET, load_drafter, load_target
from specdec.engine.engine import Engine
from specdec.training import train
from specdec.training.data import Batches, Sample
from specdec.training.data.rollouts import Rollouts
from specdec.training.loop.log import read_log
from specdec.training.loop.parallel import shell
from specdec.training.loop.settings import OnPolicy
from specdec.training.loop.trainer import Trainer
from specdec.training.objectives.eagle3 import Eagle3Objective
from specdec.training.objectives.tokens import TokensObjective


def rollouts(target, drafter, data: Batches, **how) -> Rollouts:
    return Rollouts(target, shell(drafter), data, OnPolicy(**{"share": 0.5, "temperature": 0.0} | how), seed=0)


def misses_of_a_chain(target, drafter, prompt: list[int], text: list[int], steps: int) -> list[int]:
    """Which tokens of a greedy text a chain's rounds miss, from teacher forcing: draft j of the round whose root is
    token r is what step j of the unroll makes of row r - 1."""
    ids = torch.tensor([prompt + text])
    with torch.no_grad():
        _, feats = target(ids, None, taps=drafter.taps)
        unrolled = drafter.unroll(feats, F.pad(ids[:, 1:], (0, 1)), steps)
        drafts = [drafter.vocab.to_target(state.logits[0].argmax(-1)) for state in unrolled]
    root, missed = len(prompt), []
    while True:
        right = 0
        while right < steps and root + 1 + right < ids.shape[1] and drafts[right][root - 1] == ids[0, root + 1 + right]:
            right += 1
        root += right + 1
        if root >= ids.shape[1]:
            return missed
        if right < steps:
            missed.append(root)


@pytest.fixture(scope="module")
def demo():
    target = load_target(DEMO_TARGET)
    questions = ["What is a tree?", "Write a short story about a dragon.", "How do I make tea?", "Name three animals."]
    questions += ["Why is the sky blue?", "What should I cook today?", "Explain how rain forms.", "Sing of a river."]
    prompts = [target.tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True)
               ["input_ids"] for q in questions]  # fmt: skip
    data = [Sample(np.array([*p, 5, 6], np.int32), np.arange(len(p) + 2) >= len(p)) for p in prompts]
    return target, load_drafter("demo/eagle3", target), prompts, Batches(data, 2048, 0)


@pytest.mark.parametrize("steps", [1, 4])
def test_the_weights_are_what_the_rounds_of_a_chain_miss(demo, steps):
    """Recorded while decoding, against plain greedy text and teacher-forced agreement."""
    target, drafter, prompts, data = demo
    run = rollouts(target, drafter, data, steps=steps, max_new_tokens=40, weight=3.0, batch_size=3)
    measured = run.renew(0, dict(drafter.named_parameters()))
    found = 0
    by_prompt = {tuple(s.ids[: int(s.mask.argmax())].tolist()): s for s in run.samples}
    for prompt in prompts:
        text = Engine(target).generate([prompt], max_new_tokens=40).rows[0].tokens
        missed = misses_of_a_chain(target, drafter, prompt, text, steps)
        sample = by_prompt.pop(tuple(prompt))
        assert sample.ids.tolist() == prompt + text
        assert sample.mask.tolist() == [False] * len(prompt) + [True] * len(text)
        assert sample.weights.tolist() == [3.0 if i in missed else 1.0 for i in range(len(sample.ids))]
        found += len(missed)
    assert not by_prompt
    assert found > 20
    assert measured["new_tokens"] == sum(s.mask.sum() for s in run.samples)
    assert measured["rejected"] == found / measured["new_tokens"]
    assert 1 < measured["tau"] < steps + 1


@pytest.mark.parametrize(("objective", "kind"), [(Eagle3Objective, "eagle3"), (TokensObjective, "mtp")])
def test_a_weight_counts_a_token_so_many_times(objective, kind):
    """Steps, losses and accuracy are those of a batch in which the weighted text stands so many times, where nothing
    but the weighted token is learnt."""
    target = tiny_target()
    drafter = tiny_drafter(target, draft_vocab=8, kind=kind)
    data, how = batch(target, drafter), {"steps": 3, "decay": 0.5}
    distilled = objective is Eagle3Objective  # learns the distribution of token x by the mask at x - 1
    learnt = data["teacher_logits"].argmax(-1)[2].roll(1) if distilled else data["tokens"][2]
    token = next(x for x in range(6, 11) if learnt[x] in drafter.vocab.ids)
    weights = torch.ones(4, 12)
    weights[2, token] = 3.0
    loss, metrics = objective(**how)(drafter, **data, weights=weights)
    only = torch.zeros(1, 12)
    only[0, token - distilled] = 1.0
    repeated = {k: torch.cat([v, v[2:3], v[2:3]]) for k, v in data.items()}
    repeated["loss_mask"] = torch.cat([data["loss_mask"], only, only])
    expected, same = objective(**how)(drafter, **repeated)
    assert metrics["counted"] == same["counted"] == objective(**how)(drafter, **data)[1]["counted"] + 2
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close((metrics["losses"], metrics["accuracy"]), (same["losses"], same["accuracy"]))


@pytest.mark.parametrize(("share", "expected"), [(0.25, "dddrdddrdddr"), (0.5, "drdrdrdrdrdr"), (1.0, "rrrrrrrrrrrr")])
def test_batches_take_their_share_and_the_data_keep_their_order(share, expected):
    target = tiny_target()
    data = Batches(samples(), 40, 0)
    run = rollouts(target, tiny_drafter(target), data, share=share, max_new_tokens=9)
    run.renew(0, {})
    stream, plain = run.iterate(), data.iterate()
    whole = [next(stream) for _ in expected]
    assert "".join("d" if b.weights is None else "r" for b in whole) == expected
    assert all(torch.equal(b.tokens, next(plain).tokens) for b in whole if b.weights is None)
    assert all(b.tokens.numel() <= 40 for b in whole if b.weights is not None)
    assert len(run.batches) > 1
    lengths = [n for b in run.batches for n in (b.loss_mask.cumsum(1).argmax(1) + 1).tolist()]
    assert sorted(lengths) == sorted(len(s.ids) for s in run.samples), "the batches do not hold each sample once"
    for skip in range(8):
        assert torch.equal(next(run.iterate(skip)).tokens, whole[skip].tokens)


def test_prompts_are_what_stands_before_answers():
    """Of several answers each may be written again; of plain texts a beginning; what leaves no room is left out."""
    target = tiny_target()
    chat = np.array([0, 0, 1, 1, 0, 0, 0, 1, 1, 1], dtype=bool)
    texts = [Sample(np.arange(len(mask), dtype=np.int32), mask) for mask in (chat, np.ones(12, dtype=bool))]
    run = rollouts(target, tiny_drafter(target), Batches(texts, 40, 0), max_new_tokens=3)
    for step in range(20):
        assert {2, 7} <= {len(p) for p in run._prompts(step)}
        assert all(p == list(range(len(p))) and 1 <= len(p) <= 11 for p in run._prompts(step))
    assert len({tuple(map(len, run._prompts(step))) for step in range(20)}) > 3, "the beginning is always the same"
    short = rollouts(target, tiny_drafter(target), Batches(texts[:1], 7, 0), max_new_tokens=30)
    short.renew(0, {})
    (sample,) = short.samples
    assert (len(sample.ids), sample.mask.sum()) == (7, 5)
    with pytest.raises(ValueError, match="no conversation has an answer within 2 tokens"):
        rollouts(target, tiny_drafter(target), Batches(texts[:1], 2, 0))


POLICY = {"share": 0.5, "every": 3, "prompts": 5, "batch_size": 3, "max_new_tokens": 20, "weight": 3.0, "steps": 3}


def trainer(out: Path, kind: str = "eagle3", on_policy: dict | None = None, **how) -> Trainer:
    objective = TokensObjective(steps=2) if kind.startswith(("mtp", "medusa")) else Eagle3Objective(steps=2)
    how = {"save_every": 4, "eval_batches": 0, "batch_tokens": 60} | how
    return short_runs.trainer(out, kind, objective, on_policy=None if on_policy is None else POLICY | on_policy, **how)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", LEARNERS)
def test_every_drafter_rolls_out_and_its_training_is_not_touched(tmp_path, kind):
    run = trainer(tmp_path, kind, on_policy={})
    flags = [(name, p.requires_grad, p.dtype) for name, p in run.drafter.named_parameters()]
    run.train()
    rows = read_log(tmp_path / "log.jsonl")
    assert [row["step"] for row in rows if row["split"] == "rollout"] == [0, 3]
    assert [row["on_policy"] for row in rows if row["split"] == "train"] == [0, 1, 0, 1, 0, 1]
    assert [(name, p.requires_grad, p.dtype) for name, p in run.drafter.named_parameters()] == flags
    assert getattr(run.drafter, "cache", None) is None
    assert not any(b.is_inference() for b in run.drafter.buffers())
    for mine, theirs in zip(run.parameters.values(), run.rollouts.drafter.parameters(), strict=True):
        assert mine.data_ptr() == theirs.data_ptr(), "rollouts decode with a copy of the weights"


@pytest.mark.parametrize(("accumulate", "parts"), [(1, [0, 0, 0, 1, 0, 1]), (2, [0, 0, 0.5, 0.5, 0.5, 0.5])])
def test_nothing_is_rolled_out_before_the_start(tmp_path, accumulate, parts):
    trainer(tmp_path, on_policy={"start": 2}, accumulate=accumulate).train()
    rows = read_log(tmp_path / "log.jsonl")
    assert [row["step"] for row in rows if row["split"] == "rollout"] == [2, 5]
    assert [row["on_policy"] for row in rows if row["split"] == "train"] == parts


LATE = {"on_policy": {"start": 2}}
PACKED, AVERAGED = {"pack": 40}, {"ema": 0.5, "accumulate": 2, "on_policy": {"temperature": 1.0}}


@pytest.mark.parametrize(("how", "stop_after"), [(PACKED, 2), (PACKED, 3), (AVERAGED, 3), (AVERAGED, 5), (LATE, 1)])
def test_a_run_that_was_stopped_ends_as_one_left_alone(tmp_path, how, stop_after):
    """Within a rollout's time, at its end, and in that of one that was made with weights long gone."""
    how = {"on_policy": {}} | how
    cut = trainer(tmp_path / "cut", **how)
    step = cut._step

    def step_and_stop(group):
        out = step(group)
        if cut.step == stop_after:
            os.kill(os.getpid(), signal.SIGTERM)
        return (out[0], cut.signals.asked, out[2])

    cut._step = step_and_stop
    cut.train()
    assert cut.step == stop_after
    # As a kill after the next rollout would leave it.
    with (tmp_path / "cut" / "log.jsonl").open("a") as log:
        log.write(json.dumps({"split": "rollout", "step": -(-stop_after // 3) * 3, "tau": 9.0}) + "\n")
    assert_goes_on(lambda out: trainer(out, **how), tmp_path / "cut", stop_after)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.on_policy.weight=0.5", "data.on_policy.weight must be at least 1, got 0.5"),
        ("data.on_policy.temperature=-1", "temperature must be at least 0, got -1"),
        ("data.on_policy.topk=0", "topk and steps must be at least 1, got topk 0 and steps 2"),
        ("data.on_policy.topk=300", "topk is 300, but the draft vocabulary has 200 tokens only"),
        ("+data.on_policy.shares=0.5", "data.on_policy: "),
    ],
)
def test_mistakes_are_one_sentence(where, tmp_path, capsys, override, message):
    on = "data.on_policy.share=0.5", "data.on_policy.steps=2", override
    assert refused(capsys, train, *where, *on, f"out={tmp_path}").startswith(f"error: {message}")


def test_on_policy_can_be_null(where, tmp_path):
    train.run(composed("train", *where, "trainer.steps=1", f"out={tmp_path / 'null'}", "data.on_policy=null"))
