"""On-policy data: the weights are what the rounds say, batches take their share, a run resumes bit for bit."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import LEARNERS, tiny_drafter, tiny_target
from safetensors.torch import load_file
from test_objectives import batch
from test_trainer import samples
from test_trainer_processes import ENV, ROOT, settings, train
from test_training import CONF, CONVERSATIONS

from specdec.api import DEMO_DRAFTER, DEMO_TARGET, load_drafter, load_target
from specdec.engine import Engine
from training.curves import read_log
from training.data import Batches, Sample
from training.objectives.eagle3 import Eagle3Objective
from training.objectives.tokens import TokensObjective
from training.parallel import Processes, shell
from training.rollouts import Rollouts
from training.settings import OnPolicy
from training.trainer import Trainer, TrainerConfig

TIMES = ("seconds", "rollout_seconds")


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
    prompts = [target.tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True)
               ["input_ids"] for q in questions]  # fmt: skip
    import numpy as np

    data = [Sample(np.array([*p, 5, 6], np.int32), np.arange(len(p) + 2) >= len(p)) for p in prompts]
    return target, load_drafter(DEMO_DRAFTER, target), prompts, Batches(data, 2048, 0)


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
