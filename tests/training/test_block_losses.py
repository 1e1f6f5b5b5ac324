"""The objective of block drafters against what the published trainers compute (tests/golden/README.md)."""

import json

import pytest
import torch
from golden_blocks import GOLDEN, golden_drafter, golden_heads
from safetensors.torch import load_file
from short_runs import compare_gradients

from specdec.drafters import unroll_block
from specdec.drafters.block_layers import BlockForward
from specdec.drafters.conditional import Domino
from specdec.drafters.dflash import BlockDrafter
from specdec.drafters.formats.dflash_names import parameters
from specdec.training.objectives.anchors import gathered, slots
from specdec.training.objectives.block import BlockObjective

TOKENS, DSPARK = {"tokens": 1.0}, {"tokens": 0.1, "l1": 0.9}
DIVIDED = {"denominator": "slots"}
WINDOWS = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5, "use_sliding_window": True}
LAYER = json.loads((GOLDEN / "speculators.json").read_text())["transformer_layer_config"]
NESTED = {"transformer_layer_config": LAYER | WINDOWS}
NONCAUSAL = NESTED | {"sliding_window_non_causal": True}

# name: (golden case, its loss, config, weights, other fields of the config, terms, settings)
CASES = {
    "dflash: specforge": ("specforge", "loss", "dflash", "dflash", {}, TOKENS, {}),
    "dflash: specforge, uniform": ("specforge", "uniform", "dflash", "dflash", {}, TOKENS, {"weights": "uniform"}),
    "dflash: specforge, d_pace": (
        "specforge", "d_pace", "dflash", "dflash", {}, TOKENS, {"weights": "d_pace", "denominator": "texts"},
    ),
    "dflash: specforge, windows": ("sliding.specforge", "loss", "dflash", "dflash", WINDOWS, TOKENS, {}),
    "dflash: automodel": ("automodel", "loss", "dflash", "dflash", {}, TOKENS, {"where": "whole"}),
    "dflash: automodel, variable prefix": (
        "automodel.vp", "loss", "dflash", "dflash", {}, TOKENS, {"where": "whole", "visible": 0.9},
    ),
    "dflash2: automodel": ("dflash2.automodel", "loss", "dflash2", "dflash2", {}, TOKENS, {"where": "whole"}),
    "dflash2: speculators": (
        "dflash2.speculators", "loss", "dflash2_speculators", "dflash2", {}, {"kl": 1},
        DIVIDED | {"chooses": "target", "missing": "replace"},
    ),
    "dflash: deepspec": ("deepspec", "loss", "deepspec", "dflash", {}, TOKENS, {"counts": "prefix"}),
    "dflash: speculators, windows": (
        "sliding.speculators", "loss", "speculators", "dflash", NESTED, {"kl": 1}, DIVIDED,
    ),
    "dflash: speculators, bidirectional windows": (
        "sliding.speculators", "noncausal", "speculators", "dflash", NONCAUSAL, {"kl": 1}, DIVIDED,
    ),
    "dflash: speculators, d_pace": (
        "speculators", "d_pace", "speculators", "dflash", {}, {"choice": 1}, DIVIDED | {"weights": "d_pace"},
    ),
    "dspark: deepspec and specforge": (
        "dspark.deepspec", "loss", "dspark", "dspark", {}, DSPARK, {"counts": "prefix"},
    ),
    "jetspec: automodel": (
        "jetspec", "loss", "jetspec", "jetspec", {}, {"kl": 1}, {"weights": "uniform", "where": "whole"},
    ),
    "jetspec: automodel, temperature 2": (
        "jetspec", "T2", "jetspec", "jetspec", {}, {"kl": {"temperature": 2}}, {"weights": "uniform", "where": "whole"},
    ),
}  # fmt: skip
for name, loss, terms in [
    ("kl", "loss", {"kl": 1}), ("choice", "choice", {"choice": 1}), ("tv", "tv", {"tv": 1}),
    ("reverse_kl", "reverse_kl", {"reverse_kl": 1}), ("jsd", "jsd", {"jsd": 1}), ("lk", "lk", {"lk": 1}),
    ("lk_hybrid", "lk_hybrid", {"lk_hybrid": 1}), ("two", "choice+tv", {"choice": 0.1, "tv": 0.9}),
]:  # fmt: skip
    CASES[f"dflash: speculators, {name}"] = ("speculators", loss, "speculators", "dflash", {}, terms, DIVIDED)
for name, loss, terms in [("choice", "choice", {"choice": 1}), ("kl", "loss", {"kl": 1})]:
    CASES[f"dflash: speculators, part of a vocabulary, {name}"] = (
        "vocab96", loss, "speculators", "dflash", {"draft_vocab_size": 96}, terms, DIVIDED,
    )  # fmt: skip
for kind in ("gated", "rnn"):
    CASES[f"dspark: deepspec, {kind}"] = (
        f"dspark.{kind}", "loss", "dspark", "dspark", {"markov_head_type": kind}, DSPARK, {"counts": "prefix"},
    )  # fmt: skip
for loss, terms in [("loss", {"choice": 0.1, "tv": 0.9}), *((name, {name: 1}) for name in ("choice", "kl", "tv"))]:
    CASES[f"dspark: speculators, {loss}"] = (
        "dspark.speculators", loss, "dspark_speculators", "dspark", {}, terms, DIVIDED | {"counts": "previous"},
    )  # fmt: skip


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
        last = torch.nn.functional.rms_norm(last, (64,), golden[f"norm.{model}"], 1e-6)
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
    drafter.documents = golden["packed.document_ids"] if packed else None
    objective = AtTheirAnchors(terms, gamma=4.0, **settings)
    anchors, keep = golden[f"{case}.anchors"], golden.get(f"{case}.keep")
    mask = golden[f"{'speculators' if case.startswith(('sl', 'vo')) else case}.mask"] if packed else None
    anchors = anchors[None] if packed else anchors
    keep = torch.ones_like(anchors, dtype=torch.bool) if keep is None else keep.view_as(anchors)
    objective.theirs = anchors, keep
    objective.shown = golden.get(f"{case}.visible")
    objective.counted = None if mask is None else mask[:, drafter.switches.unused :]
    loss, metrics = objective(drafter, **inputs_of(golden, packed, model, held["lm_head.weight"]))
    torch.testing.assert_close(loss.detach(), golden[f"{case}.{loss_name}"], rtol=1e-5, atol=0)
    assert torch.isfinite(metrics["losses"]).all()
    wanted = {k.split(".grad.")[1]: v for k, v in golden.items() if k.startswith(f"{case}.grad.")}
    if loss_name == "loss" and wanted:
        compare_gradients(parameters(drafter), loss, wanted)


def test_domino_on_the_authors_hidden_states(golden, monkeypatch):
    """Base and final loss in their shares, and the gradients of the head, from SpecForge's hidden states."""
    held = load_file(GOLDEN / "domino.safetensors")
    drafter = golden_drafter("dflash")
    embedding, weight = held["embed_tokens.weight"], held["lm_head.weight"]
    head = Domino(drafter.vocab, embedding, 20, state=28, prefix=1)
    drafter = BlockDrafter(
        drafter.shape, 1, (1,), drafter.vocab, embedding, weight, BlockForward(6, 318, "p+k+1"), head
    )
    tensors = {key.removeprefix("domino."): tensor for key, tensor in held.items() if key.startswith("domino.")}
    names = {key: place for key, place in parameters(drafter).items() if key in tensors}
    for key, (parameter, _, _) in names.items():
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
