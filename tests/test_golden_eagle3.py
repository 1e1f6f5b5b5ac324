"""Our EAGLE-3 against outputs of the EAGLE authors' own code (tests/golden/README.md)."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drafters.formats import eagle3 as layout
from specdec.archs import ModelConfig
from specdec.layers import Rope
from specdec.model import Target
from training.objectives.eagle3 import Eagle3Objective
from trees import DynamicTree

GOLDEN = Path(__file__).parent / "golden" / "eagle3"


@pytest.fixture
def reference():
    return load_file(GOLDEN / "reference.safetensors")


@pytest.fixture
def drafter(reference):
    """The golden head on a stand-in target: only its embedding, its size and its depth matter here."""
    config = ModelConfig(
        layers=8, hidden=64, intermediate=8, heads=4, kv_heads=2, head_dim=16, vocab=320, eps=1e-5, rope=Rope(),
        context=512, tied=False,
    )  # fmt: skip
    target = Target(config)
    target.embed.weight.copy_(reference["embed_tokens.weight"])
    head = json.loads((GOLDEN / "config.json").read_text())
    return layout.build(head, load_file(GOLDEN / "model.safetensors"), target, "golden")


@torch.inference_mode()
def test_both_drafting_steps_match(drafter, reference):
    policy = DynamicTree(topk=5, steps=5, num_draft_tokens=24)
    drafter.reset(1, 64, torch.zeros(1, dtype=torch.int64))
    absorbed = 0
    for step in ("step0", "step1"):
        feats, ids = reference[f"{step}_features"], reference[f"{step}_ids"]
        new = feats.shape[1]
        absorbed += new
        state = drafter.extend(feats, ids[:, -new:], torch.tensor([new]), absorbed)
        tree = policy.grow(drafter, ids[:, -1], state)
        assert tree.tokens.tolist() == reference[f"{step}_draft_tokens"].tolist()
        assert tree.depth[0].tolist() == reference[f"{step}_positions"].tolist()
        assert torch.equal(tree.ancestors[0], reference[f"{step}_tree_mask"][0, 0].bool())


def test_training_pass_matches(drafter):
    golden = load_file(GOLDEN / "ttt_reference.safetensors")
    objective = Eagle3Objective(steps=7, decay=0.8, mean="all")
    loss, metrics = objective(
        drafter,
        feats=golden["features"],
        tokens=golden["input_ids"],
        target_logits=golden["target_logits"],
        loss_mask=golden["loss_mask"],
    )
    torch.testing.assert_close(metrics["losses"], golden["ploss"], rtol=0, atol=1e-5)
    torch.testing.assert_close(loss, golden["total_loss"][0], rtol=0, atol=1e-5)
    loss.backward()
    for name, (parameter, start, rows) in layout.parameters(drafter).items():
        expected = golden[f"grad.{name}"]
        difference = (parameter.grad[start : start + rows] - expected).norm() / expected.norm()
        assert difference < 1e-4, f"{name}: relative difference {difference:.1e}"
