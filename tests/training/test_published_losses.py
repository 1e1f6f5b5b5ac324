"""Objectives of block drafters, P-EAGLE and PARD against the published trainers (tests/golden/README.md)."""

import json
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from golden_blocks import GOLDEN, golden_drafter, golden_heads
from safetensors.torch import load_file
from short_runs import compare_gradients

from specdec.drafters import unroll_block
from specdec.drafters.block_layers import BlockForward
from specdec.drafters.conditional import Domino
from specdec.drafters.dflash import BlockDrafter
from specdec.drafters.formats import pard, peagle
from specdec.drafters.formats.dflash import FAMILY
from specdec.training.objectives import parallel
from specdec.training.objectives.anchors import gathered, slots
from specdec.training.objectives.block import BlockObjective
from specdec.training.objectives.parallel import ParallelObjective

TOKENS, DSPARK, KL = {"tokens": 1.0}, {"tokens": 0.1, "l1": 0.9}, {"kl": 1}
WINDOWS = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5, "use_sliding_window": True}
LAYER = json.loads((GOLDEN / "speculators.json").read_text())["transformer_layer_config"]
NESTED = {"transformer_layer_config": LAYER | WINDOWS}
NONCAUSAL = NESTED | {"sliding_window_non_causal": True}


def case(golden: str, loss="loss", config="dflash", model=None, changes=None, terms=TOKENS, **settings) -> tuple:
    """The golden case and its loss, the config and weights, other fields of the config, terms, further settings."""
    return golden, loss, config, model or config, changes or {}, terms, settings


speculators = partial(case, config="speculators", model="dflash", denominator="slots")
CASES = {
    "dflash: specforge": case("specforge"),
    "dflash: specforge, uniform": case("specforge", "uniform", weights="uniform"),
    "dflash: specforge, d_pace": case("specforge", "d_pace", weights="d_pace", denominator="texts"),
    "dflash: specforge, windows": case("sliding.specforge", changes=WINDOWS),
    "dflash: automodel": case("automodel", where="whole"),
    "dflash: automodel, variable prefix": case("automodel.vp", where="whole", visible=0.9),
    "dflash2: automodel": case("dflash2.automodel", config="dflash2", where="whole"),
    "dflash2: speculators": speculators(
        "dflash2.speculators",
        config="dflash2_speculators",
        model="dflash2",
        terms=KL,
        chooses="target",
        missing="replace",
    ),
    "dflash: deepspec": case("deepspec", config="deepspec", model="dflash", counts="prefix"),
    "dflash: speculators, windows": speculators("sliding.speculators", changes=NESTED, terms=KL),
    "dflash: speculators, two-sided": speculators("sliding.speculators", "noncausal", changes=NONCAUSAL, terms=KL),
    "dflash: speculators, d_pace": speculators("speculators", "d_pace", terms={"choice": 1}, weights="d_pace"),
    "dflash: speculators, two": speculators("speculators", "choice+tv", terms={"choice": 0.1, "tv": 0.9}),
    "jetspec: automodel": case("jetspec", config="jetspec", terms=KL, weights="uniform", where="whole"),
    "jetspec: automodel, temperature 2": case(
        "jetspec", "T2", config="jetspec", terms={"kl": {"temperature": 2}}, weights="uniform", where="whole"
    ),
}
for term in ("kl", "choice", "tv", "reverse_kl", "jsd", "lk", "lk_hybrid"):
    how = {"loss": "loss" if term == "kl" else term, "terms": {term: 1}}
    CASES[f"dflash: speculators, {term}"] = speculators("speculators", **how)
    if term in ("kl", "choice"):
        CASES[f"dflash: vocab96, {term}"] = speculators("vocab96", changes={"draft_vocab_size": 96}, **how)
for kind, golden in (("vanilla", "deepspec"), ("gated", "gated"), ("rnn", "rnn")):
    changes = {} if kind == "vanilla" else {"markov_head_type": kind}
    CASES[f"dspark: deepspec, {kind}"] = case(
        f"dspark.{golden}", config="dspark", changes=changes, terms=DSPARK, counts="prefix"
    )
for loss, terms in [("loss", {"choice": 0.1, "tv": 0.9}), *((name, {name: 1}) for name in ("choice", "kl", "tv"))]:
    CASES[f"dspark: speculators, {loss}"] = speculators(
        "dspark.speculators", loss, config="dspark_speculators", model="dspark", terms=terms, counts="previous"
    )


@pytest.fixture(scope="module")
def golden():
    return load_file(GOLDEN / "train.safetensors") | load_file(GOLDEN / "train_more.safetensors")


class AtTheirAnchors(BlockObjective):
    """With the anchors that the authors drew, what they showed of blocks, and, where they are given, what they let
    count."""

    counted = shown = None

    def slots(self, drafter, loss_mask, weights):
        documents = torch.zeros_like(loss_mask) if drafter.documents is None else drafter.documents
        ours = slots(*self.theirs, drafter.block, self.counts, loss_mask, documents, weights, self.shown)
        if self.counted is None:
            return ours
        wide = slots(*self.theirs, drafter.block, self.counts, loss_mask, torch.zeros_like(documents), weights)
        torch.testing.assert_close(wide.mask, self.counted[self.counted.any(1)])  # theirs cross a document's end
        return gathered(self.theirs[0], self.counted[None])


class SpecForgeWindow(BlockForward):
    """SpecForge's training has no window inside the block, z-lab's decoding has. They differ where a window is shorter
    than the block."""

    def seen(self, sliding):
        return torch.ones(self.rows, self.rows, dtype=torch.bool).tril() if sliding else super().seen(sliding)


def inputs_of(golden: dict, packed: bool, model: str, target) -> dict:
    rows = "packed" if packed else "rows"
    last = golden[f"{rows}.target_last_hidden"]
    if packed:  # stored before the target's final norm
        last = F.rms_norm(last, (64,), golden[f"norm.{model}"], 1e-6)
    names = {"feats": "target_hidden", "tokens": "input_ids", "loss_mask": "loss_mask"}
    inputs = {ours: golden[f"{rows}.{theirs}"] for ours, theirs in names.items()}
    if not packed and f"{model}.input_ids" in golden:
        inputs["tokens"] = golden[f"{model}.input_ids"]
    return inputs | {"teacher_logits": last @ target.T}


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_of_published_trainers(golden, name):
    """Losses to 1e-5, and every gradient to 1e-4 of its largest entry. Gradients of matrices are stored as products
    with four vectors of cosines."""
    case, loss_name, config, model, changes, terms, settings = CASES[name]
    held = load_file(GOLDEN / f"{model}_model.safetensors")
    extra = {key: golden[f"{case}.{key}"] for key in ("lm_head.weight", "d2t") if f"{case}.{key}" in golden}
    if model == "dspark":
        extra = golden_heads(load_file(GOLDEN / "dspark.safetensors"), changes.get("markov_head_type", "vanilla"))
    drafter = golden_drafter(config, model, keeps=config in ("deepspec", "dspark"), extra=extra, **changes)
    if case == "sliding.specforge":
        drafter.switches = SpecForgeWindow(**vars(drafter.switches))
    packed = f"{case}.mask" in golden or case == "sliding.speculators"
    objective = AtTheirAnchors(terms, gamma=4.0, **settings)
    anchors, keep = golden[f"{case}.anchors"], golden.get(f"{case}.keep")
    if packed:
        anchors, drafter.documents = anchors[None], golden["packed.document_ids"]
        mask = golden[f"{'speculators' if case.startswith(('sl', 'vo')) else case}.mask"]
        objective.counted = mask[:, drafter.switches.unused :]
    keep = torch.ones_like(anchors, dtype=torch.bool) if keep is None else keep.view_as(anchors)
    objective.theirs, objective.shown = (anchors, keep), golden.get(f"{case}.visible")
    loss, metrics = objective(drafter, **inputs_of(golden, packed, model, held["lm_head.weight"]))
    torch.testing.assert_close(loss.detach(), golden[f"{case}.{loss_name}"], rtol=1e-5, atol=0)
    assert torch.isfinite(metrics["losses"]).all()
    wanted = {k.split(".grad.")[1]: v for k, v in golden.items() if k.startswith(f"{case}.grad.")}
    if loss_name == "loss" and wanted:
        compare_gradients(FAMILY.parameters(drafter), loss, wanted)


def test_domino_on_the_authors_hidden_states(golden, monkeypatch):
    """Base and final loss in their shares, and the gradients of the head, from SpecForge's hidden states."""
    held = load_file(GOLDEN / "domino.safetensors")
    drafter, embedding, weight = golden_drafter("dflash"), held["embed_tokens.weight"], held["lm_head.weight"]
    head = Domino(drafter.vocab, embedding, 20, state=28, prefix=1)
    ends = drafter.vocab, embedding, weight
    drafter = BlockDrafter(drafter.shape, 1, (1,), *ends, BlockForward(6, 318, "p+k+1"), head)
    tensors = {key.removeprefix("domino."): tensor for key, tensor in held.items() if key.startswith("domino.")}
    names = {key: place for key, place in FAMILY.parameters(drafter).items() if key in tensors}
    for key, parameter in names.items():
        parameter.data.copy_(tensors.pop(key))
    assert not tensors
    monkeypatch.setattr(unroll_block, "slots_behind", lambda *_: held["train.hidden"])
    objective = AtTheirAnchors(TOKENS, gamma=4.0, base=0.3)
    objective.theirs = held["train.anchors"], held["train.keep"]
    inputs = inputs_of(golden, False, "domino", weight)
    loss, _ = objective(drafter, **inputs)
    torch.testing.assert_close(loss.detach(), held["train.loss"], rtol=1e-5, atol=0)
    compare_gradients(names, loss, {key: held[f"train.grad.{key}"] for key in names})
    objective.base = 1.0  # the base logits' own loss alone, which is gone halfway
    torch.testing.assert_close(objective(drafter, **inputs)[0].detach(), held["train.base_loss"], rtol=1e-5, atol=0)
    objective.progress = 0.25
    halfway = objective(drafter, **inputs)[0]
    objective.base, objective.progress = 0.5, 0.0
    assert objective(drafter, **inputs)[0] == halfway
    objective.progress = 0.5
    assert objective.base_share == 0


# Rows of mask tokens


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
    anchors = torch.where(shifted[anchors] < 0, -2, anchors + shifted[anchors] + 1)  # the row's token
    objective = AtTheirRows(terms, known_only=known)
    objective.theirs = rows_at(tokens.shape, anchors, golden[f"{rows}.depth"], 4)
    last = F.rms_norm(golden["train.target_last_hidden"], (64,), golden["train.norm.weight"], 1e-6)
    logits = last @ golden["train.target.lm_head.weight"].T
    loss, metrics = objective(drafter, golden["train.target_hidden"], tokens, logits, golden["train.loss_mask"])
    torch.testing.assert_close(loss.detach(), golden[loss_name], rtol=1e-5, atol=0)
    assert len(metrics["losses"]) == 4
    if name in ("kl", "specforge"):
        held = peagle.FAMILY.parameters(drafter) | {"mask_hidden": drafter.mask_hidden}
        places = {key.replace("midlayer.", "layers.0."): place for key, place in held.items()}
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
        compare_gradients(pard.FAMILY.parameters(drafter), loss, wanted)


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
    believed, known_logprobs = parallel.believed, F.pad(known[:, 1:], (0, 1), value=1.0).log()

    def with_token_0(rows, logp):
        nothing_before = rows.anchors[rows.row, rows.place] < 0
        return believed(rows, logp) * torch.where(nothing_before, known[rows.row, 0], 1.0)

    monkeypatch.setattr(parallel, "teacher_logprobs", lambda *given: known_logprobs)
    monkeypatch.setattr(parallel, "believed", with_token_0)
    mask = (inputs["labels"] >= 0).float()
    for row, labels in enumerate(inputs["labels"]):  # tokens before the last end token are no training tokens
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
        compare_gradients(pard.FAMILY.parameters(drafter), loss, wanted)
