"""Our EAGLE drafters against outputs of the EAGLE authors' own code (tests/golden/README.md)."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from golden_blocks import absorb, golden_target
from safetensors.torch import load_file
from short_runs import gradient
from torch import Tensor

from specdec.drafters.formats import eagle3, recognise
from specdec.training.objectives.eagle3 import Eagle3Objective
from specdec.trees import DynamicTree

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = ("eagle2", "eagle3", "eagle3_mask")


def golden_drafter(name: str):
    """The golden head on its stand-in target."""
    reference = load_file(GOLDEN / name / "reference.safetensors")
    target = golden_target(reference, layers=8)
    config = json.loads((GOLDEN / name / "config.json").read_text())
    tensors = load_file(GOLDEN / name / "model.safetensors")
    family, layout = recognise(config, tensors, name)
    return family.construct(*layout.read(config, tensors, name), target, name), reference


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_both_drafting_steps_match(name):
    drafter, reference = golden_drafter(name)
    policy = DynamicTree(topk=5, steps=5, num_draft_tokens=24)
    seen = 0
    for step in ("step0", "step1"):
        feats, ids = reference[f"{step}_features"], reference[f"{step}_ids"]
        new = feats.shape[1]
        state, seen = absorb(drafter, feats, ids[:, -new:], seen), seen + new
        tree = policy.grow(drafter, ids[:, -1], state)
        assert tree.tokens.tolist() == reference[f"{step}_draft_tokens"].tolist()
        assert tree.depth[0].tolist() == reference[f"{step}_positions"].tolist()
        assert torch.equal(tree.ancestors[0], reference[f"{step}_tree_mask"][0, 0].bool())


def our_inputs(golden: dict[str, Tensor]) -> dict[str, Tensor]:
    """The golden batch with its mask where ours belongs: their row t, which drafts what the target predicts at t+1,
    weighs mask[t], ours weighs mask[t+1]. Their last row drafts what a column of zeros predicts; it counts where its
    mask is 1, so that column is here too."""
    return {
        "feats": F.pad(golden["features"], (0, 0, 0, 1)),
        "tokens": F.pad(golden["input_ids"], (0, 1)),
        "teacher_logits": F.pad(golden["target_logits"], (0, 0, 0, 1)),
        "loss_mask": F.pad(golden["loss_mask"], (1, 0)),
    }


@pytest.mark.parametrize("name", ["eagle3", "eagle3_mask"])
def test_training_pass_matches(name):
    drafter, _ = golden_drafter(name)
    golden = load_file(GOLDEN / name / "ttt_reference.safetensors")
    inputs = our_inputs(golden)
    loss, metrics = Eagle3Objective(steps=7, decay=0.8, mean="all")(drafter, **inputs)
    theirs = inputs["tokens"].numel() / golden["input_ids"].numel()  # they divide by their number of positions
    torch.testing.assert_close(metrics["losses"] * theirs, golden["ploss"], rtol=0, atol=1e-5)
    torch.testing.assert_close(loss * theirs, golden["total_loss"][0], rtol=0, atol=1e-5)
    (loss * theirs).backward()
    for name, rows in eagle3.FAMILY.parameters(drafter).items():
        expected = golden[f"grad.{name}"]
        difference = (gradient(rows) - expected).norm() / expected.norm()
        assert difference < 1e-4, f"{name}: relative difference {difference:.1e}"
