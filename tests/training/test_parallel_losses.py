"""The objective of P-EAGLE and PARD against what the published trainers compute (tests/golden/README.md)."""

import pytest
import torch
import torch.nn.functional as F
from golden_blocks import GOLDEN, golden_drafter
from safetensors.torch import load_file
from short_runs import compare_gradients

from specdec.drafters.formats import pard, peagle
from specdec.training.objectives import parallel
from specdec.training.objectives.parallel import ParallelObjective


class AtTheirRows(ParallelObjective):
    """With the rows that the authors drew: [b,p+1,d] for anchor p and depth d."""

    theirs: torch.Tensor

    def rows_of(self, drafter, learnt, documents):
        width, depths = learnt.shape[1], self.theirs.shape[2]
        columns = torch.arange(-1, width)[:, None] + torch.arange(depths)
        inside = (columns >= 0) & (columns < width)
        return self.theirs & inside & learnt[:, columns.clamp(0, width - 1)]


def rows_at(shape: tuple[int, int], anchors, depths, block: int) -> torch.Tensor:
    """The same rows in every text of a batch [B,T]."""
    out = torch.zeros(shape[0], shape[1] + 1, block, dtype=torch.bool)
    there = anchors >= -1
    out[:, anchors[there] + 1, depths[there]] = True
    return out


# name: (whose rows, terms, known_only, changes of the config, the golden loss)
PEAGLE = {
    "kl": ("speculators", {"kl": 1}, False, {}, "speculators.loss"),
    "choice": ("speculators", {"choice": 1}, False, {}, "speculators.loss_ce"),
    "reverse_kl": ("speculators", {"reverse_kl": 1}, False, {}, "speculators.loss_rkl"),
    "tv, renormalised": ("speculators", {"tv": {"renormalised": True}}, False, {}, "speculators.loss_tv"),
    "norm before residual": (
        "speculators", {"kl": 1}, False, {"norm_before_residual": True}, "speculators.loss_norm_before_residual",
    ),
    "nine anchors": ("speculators.max_anchors9", {"kl": 1}, False, {}, "speculators.max_anchors9.loss"),
    "specforge": ("specforge", {"ce": 1}, True, {}, "specforge.loss"),
}  # fmt: skip


@pytest.mark.parametrize("name", PEAGLE)
def test_peagle(name):
    """Their rows are those of documents that were shifted by one token each: row s of document d is ours s + d."""
    golden, (rows, terms, known, changes, loss_name) = load_file(GOLDEN / "peagle.safetensors"), PEAGLE[name]
    drafter = golden_drafter("peagle_speculators", "peagle", **changes)
    drafter.documents = golden["train.document_ids"]
    tokens, shifted = golden["train.input_ids"], golden["train.shifted.document_ids"][0]
    anchors = golden[f"{rows}.anchor_pos"]
    anchors = torch.where(shifted[anchors] < 0, -2, anchors + shifted[anchors] + 1)  # the token beside the row
    objective = AtTheirRows(terms, known_only=known)
    objective.theirs = rows_at(tokens.shape, anchors, golden[f"{rows}.depth"], 4)
    last = F.rms_norm(golden["train.target_last_hidden"], (64,), golden["train.norm.weight"], 1e-6)
    loss, metrics = objective(
        drafter,
        golden["train.target_hidden"],
        tokens,
        last @ golden["train.target.lm_head.weight"].T,
        golden["train.loss_mask"],
    )
    torch.testing.assert_close(loss.detach(), golden[loss_name], rtol=1e-5, atol=0)
    assert len(metrics["losses"]) == 4
    if name in ("kl", "specforge"):
        places = {key.replace("midlayer.", "layers.0."): place for key, place in peagle.parameters(drafter).items()}
        compare_gradients(places, loss, {k.split(".grad.")[1]: v for k, v in golden.items() if f"{rows}.grad." in k})


def in_order(copies, positions, width: int):
    """Rows of PARD, the mask tokens of copy c at position t, which the authors keep in this order: anchors and depths.
    When rows are dropped, the last that is left loses its label."""
    lost = torch.arange(len(copies)) == len(copies) - 1
    keep = ~lost if len(copies) < 4 * width else torch.ones_like(lost)
    return torch.where(keep, positions - copies, -2), copies


@pytest.mark.parametrize("name", ["full", "cod"])
def test_pard(name):
    golden = load_file(GOLDEN / "pard.safetensors")
    drafter = golden_drafter("pard", "pard", block_size=4)
    tokens, labels = golden["train.input_ids"], golden["train.labels"]
    copies, positions = torch.arange(4).repeat_interleave(24), torch.arange(24).repeat(4)
    if name == "cod":
        copies, positions = golden["cod.row_copy"], golden["cod.row_position"]
    objective = AtTheirRows({"tokens": 1}, counts="label", known_only=False)
    objective.theirs = rows_at(tokens.shape, *in_order(copies, positions, 24), 4)
    drafter.first_tokens = tokens[:, 0]
    logits = torch.zeros(2, 24, 320)  # of which this loss reads nothing
    loss, _ = objective(drafter, torch.zeros(2, 24, 0), tokens, logits, (labels >= 0).float())
    torch.testing.assert_close(loss.detach(), golden[f"{name}.loss"], rtol=1e-5, atol=0)
    if name == "cod":
        wanted = {key.removeprefix("cod.grad."): v for key, v in golden.items() if key.startswith("cod.grad.")}
        compare_gradients(pard.parameters(drafter), loss, wanted)


@pytest.mark.parametrize(("weights", "name"), [("teacher", "loss"), ("uniform", "loss_without_prev_prob")])
def test_pard2(weights, name, monkeypatch):
    """The golden's features and probabilities are made up, those of token 0 too, where in truth they are 0 and 1."""
    golden = load_file(GOLDEN / "pard.safetensors")
    inputs = {key.removeprefix("train2."): v for key, v in golden.items() if key.startswith("train2.")}
    changes = {"spd_type": "pard2", "pard2_target_layers": [-1, -4, -8]}
    drafter = golden_drafter(
        "pard", "pard", extra={"target_proj.weight": inputs["target_proj.weight"]}, block_size=4, **changes
    )
    texts, features = drafter.texts, F.pad(inputs["target_feat"], (0, 0, 0, 1))
    monkeypatch.setattr(drafter, "texts", lambda *given: (features, *texts(*given)[1:]))
    known = inputs["teacher_gold_prob"]
    believed, told = parallel.believed, F.pad(known[:, 1:], (0, 1), value=1.0).log()

    def with_token_0(rows, logp):
        nothing_before = rows.anchors[rows.row, rows.place] < 0
        return believed(rows, logp) * torch.where(nothing_before, known[rows.row, 0], 1.0)

    monkeypatch.setattr(parallel, "told", lambda *given: told)
    monkeypatch.setattr(parallel, "believed", with_token_0)
    mask = (inputs["labels"] >= 0).float()
    for row, labels in enumerate(inputs["labels"]):  # what stands before the last end token is not learnt
        ends = (labels == inputs["end_token_id"]).nonzero()
        mask[row, : int(ends[-1]) if len(ends) else 0] = 0
    positions = golden["pard2.position_ids"]
    copies = F.pad((positions[1:] <= positions[:-1]).long().cumsum(0), (1, 0))
    objective = AtTheirRows({"tokens": 0.1, "kl": 1}, counts="label", weights=weights, known_only=False)
    objective.theirs = rows_at(mask.shape, *in_order(copies, positions, 24), 4)
    tokens = inputs["input_ids"]
    drafter.first_tokens = tokens[:, 0]
    logits = inputs["teacher_hidden"] @ inputs["target_head.weight"].T
    loss, _ = objective(drafter, inputs["target_feat"], tokens, logits, mask)
    torch.testing.assert_close(loss.detach(), golden[f"pard2.{name}"], rtol=1e-5, atol=0)
    if weights == "teacher":
        wanted = {key.removeprefix("pard2.grad."): v for key, v in golden.items() if key.startswith("pard2.grad.")}
        compare_gradients(pard.parameters(drafter), loss, wanted)
