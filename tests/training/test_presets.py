"""What the presets of other trainers set, and that every objective of conf/ can be built and trains."""

from pathlib import Path

import pytest
import torch
from helpers import tiny_target
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf

from specdec.drafters.eagle3 import spread_taps
from specdec.drafters.vocab import DraftVocab

CONF = Path(__file__).parents[2] / "conf"
OBJECTIVES = sorted(path.stem for path in (CONF / "objective").glob("*.yaml"))
# (drafter, objective, trainer, data) of each, as the trainers themselves state it: sources in the presets
PRESETS = {
    "eagle": (
        {"draft_vocab_size": 32000, "train_head": True},
        {"terms": {"ce": 1.0}, "steps": 7, "decay": 0.8, "mean": "all", "known_only": True, "noise": 0.0},
        {"lr": 5e-5, "steps": 800_000, "warmup": 12_000, "schedule": "linear", "clip": 0.5, "betas": [0.9, 0.95]},
        {"max_length": 2048},
    ),
    "specforge": (
        {"draft_vocab_size": 32000, "train_head": True},
        {"terms": {"ce": 1.0}, "steps": 7, "decay": 0.8, "mean": "all", "known_only": True, "noise": 0.0},
        {"lr": 1e-4, "muon_lr": None, "warmup": 0.015, "schedule": "cosine", "clip": 0.5},
        {"max_length": 2048},
    ),
    "speculators": (
        {"draft_vocab_size": 32000, "train_head": False, "residual_norm": True},
        {"terms": {"kl": 1.0}, "steps": 3, "decay": 1.0, "mean": "masked", "known_only": False, "noise": 0.1},
        {"lr": 1e-4, "muon_lr": 1e-3, "schedule": "linear", "clip": 1.0},
        {"max_length": 8192},
    ),
    "modelopt": (
        {"draft_vocab_size": 32000, "train_head": True},
        {"terms": {"ce": 1.0}, "steps": 4, "decay": 1.0, "mean": "masked", "known_only": False, "noise": 0.0},
        {"lr": 5e-5, "muon_lr": None, "warmup": 0, "schedule": "linear", "clip": 1.0},
        {},
    ),
    "deepspec": (
        {"draft_vocab_size": None, "train_head": False, "taps": 5},
        {"terms": {"ce": 1.0}, "steps": 7, "decay": 0.8, "mean": "masked", "known_only": False, "noise": 0.0},
        {"lr": 6e-4, "muon_lr": None, "warmup": 0.04, "clip": 1.0},
        {"max_length": 4096},
    ),
}
# Those of block drafters, in the same order
BLOCK_PRESETS = {
    "dflash": (
        {"layers": 5, "taps": 5, "block_size": 16, "label": "p+k", "causal": False, "conditional": None},
        {"terms": {"tokens": 1.0}, "anchors": 512, "where": "next", "counts": "label", "weights": "exp", "gamma": 7.0},
        {"lr": 6e-4, "muon_lr": None, "epochs": 6, "warmup": 0.04, "clip": 1.0},
        {"max_length": 3072},
    ),
    "dspark": (
        {"layers": 5, "taps": 5, "block_size": 7, "label": "p+k+1", "conditional": "markov", "confidence": True},
        {"terms": {"tokens": 0.1, "l1": 0.9}, "anchors": 512, "counts": "prefix", "gamma": 4.0, "confidence": 1.0},
        {"lr": 6e-4, "muon_lr": None, "epochs": 10, "warmup": 0.04, "clip": 1.0, "weight_decay": 0.0},
        {"max_length": 4096},
    ),
    "domino": (
        {
            "layers": 5,
            "block_size": 16,
            "label": "p+k+1",
            "conditional": "domino",
            "head": {"state": 1024, "prefix": 1},
        },
        {"terms": {"tokens": 1.0}, "anchors": 256, "gamma": 7.0, "base": 1.0, "base_until": 1.0},
        {"lr": 6e-4, "muon_lr": None, "epochs": 6, "warmup": 0.04, "clip": 1.0},
        {"max_length": 3072},
    ),
    "jetspec": (
        {"layers": 5, "taps": 5, "block_size": 16, "label": "p+k", "causal": True, "conditional": None},
        {"terms": {"kl": 1.0}, "anchors": 512, "where": "whole", "weights": "uniform", "denominator": "weights"},
        {"lr": 6e-4, "muon_lr": None, "epochs": 6, "warmup": 0.04, "clip": 1.0},
        {"max_length": 3072},
    ),
}
# And those of P-EAGLE and PARD
PARALLEL_PRESETS = {
    "peagle": (
        {"draft_vocab_size": 32000, "layers": 4, "taps": None, "block_size": 8, "train_head": False},
        {"terms": {"kl": 1.0}, "kept": 0.7, "kept_min": 0.2, "pool": "learnt", "counts": "previous"},
        {"lr": 1e-4, "muon_lr": 1e-3, "schedule": "linear", "clip": 1.0},
        {"max_length": 8192},
    ),
    "pard": (
        {"block_size": 8, "taps": None},
        {"terms": {"tokens": 1.0}, "kept": 0.7, "kept_min": 0.2, "pool": "all", "counts": "label"},
        {"lr": 1e-5, "muon_lr": None, "epochs": 4, "warmup": 0, "schedule": "constant"},
        {"max_length": 512},
    ),
    "pard2": (
        {"block_size": 16, "taps": 4, "scale": 0.02},
        {"terms": {"tokens": 0.1, "kl": 1.0}, "kept_min": 0.1, "counts": "label", "weights": "teacher", "drop": 0.2},
        {"lr": 1e-5, "muon_lr": None, "epochs": 4, "warmup": 0, "schedule": "constant"},
        {"max_length": 512},
    ),
}  # fmt: skip


def composed(*overrides: str) -> dict:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        # `out` names the choice of drafter, which only a run of the command knows.
        return OmegaConf.to_container(compose("train", [*overrides, "out=runs/x"]))


def prepared(config: dict, length: int = 12):
    """A tiny target, the drafter of a configuration for it, and an objective's inputs."""
    target = tiny_target(layers=8)
    settings = dict(config["drafter"])
    torch.manual_seed(1)
    vocab = DraftVocab(17, torch.arange(1, 17, 2) if settings.pop("draft_vocab_size") else None)
    drafter = instantiate(settings, target=target, vocab=vocab)
    tokens = torch.randint(17, (3, length))
    with torch.no_grad():
        logits, feats = target(tokens, None, taps=drafter.taps)
    feats, drafter.first_tokens = torch.zeros(3, length, 0) if feats is None else feats, tokens[:, 0]
    mask = torch.ones(3, length)
    return target, drafter, {"feats": feats, "tokens": tokens, "teacher_logits": logits, "loss_mask": mask}


def test_every_preset_is_listed():
    names = {f"preset_{name}" for name in (*PRESETS, *BLOCK_PRESETS, *PARALLEL_PRESETS)}
    assert {path.stem for path in (CONF / "experiment").glob("preset_*.yaml")} == names


@pytest.mark.parametrize("name", PRESETS)
def test_preset(name):
    config, plain = composed(f"+experiment=preset_{name}"), composed()
    for group, expected in zip(("drafter", "objective", "trainer", "data"), PRESETS[name], strict=True):
        assert expected.items() <= config[group].items()
    for group in ("trainer", "data", "objective"):
        assert config[group].keys() == plain[group].keys(), "a preset sets what does not exist"
    assert config["objective"]["renormalise"]
    target, drafter, inputs = prepared(config)
    loss, metrics = instantiate(config["objective"])(drafter, **inputs)
    loss.backward()
    assert len(metrics["losses"]) == config["objective"]["steps"]
    assert len(drafter.taps) == (5 if name == "deepspec" else 3)
    assert drafter.switches.residual_norm == (name == "speculators")
    if config["drafter"]["train_head"]:
        assert drafter.head.weight.grad.abs().max() > 0
    else:
        rows = slice(None) if drafter.vocab.ids is None else drafter.vocab.ids
        assert not drafter.head.weight.requires_grad
        assert torch.equal(drafter.head.weight, target.head.weight[rows])


def check_block_preset(preset: str, expected: tuple[dict, ...], drafter: str, objective: str, block: int) -> tuple:
    """What it sets, and that all of its drafter learns from one batch. Returns the target and the drafter."""
    config = composed(f"+experiment=preset_{preset}")
    plain = composed(f"drafter={drafter}", f"objective={objective}", "trainer=small")
    for group, entries in zip(("drafter", "objective", "trainer", "data"), expected, strict=True):
        assert entries.items() <= config[group].items()
        assert config[group].keys() == plain[group].keys(), "a preset sets what does not exist"
    target, made, inputs = prepared(config, length=20)
    loss, metrics = instantiate(config["objective"])(made, **inputs)
    loss.backward()
    assert len(metrics["losses"]) == made.block == block
    assert metrics["counted"] > 1
    learnt = {key for key, parameter in made.named_parameters() if parameter.grad is not None}
    assert learnt == {key for key, _ in made.named_parameters()}
    return target, made


@pytest.mark.parametrize("name", BLOCK_PRESETS)
def test_block_preset(name):
    block, kind = {"dspark": 7, "domino": 16}.get(name, 15), "dspark" if name == "dspark" else "dflash"
    _, drafter = check_block_preset(name, BLOCK_PRESETS[name], kind, "block", block)
    assert drafter.switches.causal == (name == "jetspec")


@pytest.mark.parametrize("name", PARALLEL_PRESETS)
def test_parallel_preset(name):
    block, kind = 16 if name == "pard2" else 8, "peagle" if name == "peagle" else "pard"
    target, drafter = check_block_preset(name, PARALLEL_PRESETS[name], kind, "parallel", block)
    if name == "peagle":
        assert torch.equal(drafter.head.weight, target.head.weight[drafter.vocab.ids])


def test_spread_taps():
    """Five of a 36-layer target: outputs of layers 1, 9, 17, 25, 33, which are hidden states one further on."""
    assert spread_taps(36, 5) == (2, 10, 18, 26, 34)
    with pytest.raises(ValueError, match="cannot spread 5 taps over a target of 6 layers"):
        spread_taps(6, 5)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_of_conf_learns(name):
    """A small step down the gradient lowers the loss by at least half of its length times the gradient's norm; not just
    by all of it, for what LK's hybrid holds constant is no constant."""
    drafters = {
        "medusa": "medusa",
        "mtp": "mtp",
        "eagle": "eagle",
        "hass": "eagle",
        "block": "dflash",
        "parallel": "peagle",
    }
    config = composed(f"objective={name}", f"drafter={drafters.get(name, 'eagle3')}")
    objective = instantiate(config["objective"] | {"noise": 0.0})
    _, drafter, inputs = prepared(config)
    loss, _ = objective(drafter, **inputs)
    learners = [p for p in drafter.parameters() if p.requires_grad]
    grads = torch.autograd.grad(loss, learners, allow_unused=True, materialize_grads=True)
    norm, step = torch.cat([g.flatten() for g in grads]).norm(), 1e-2
    with torch.no_grad():
        for parameter, grad in zip(learners, grads, strict=True):
            parameter -= step / norm * grad
        after, _ = objective(drafter, **inputs)
    assert loss - after > 0.5 * step * norm


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ({"kll": 1.0}, r"objective\.terms has no 'kll'; there are ce, kl,"),
        ({"ce": 0.0}, r"objective\.terms needs a term of a weight other than 0"),
        ({"lk_hybrid": {"eta": 3.0}}, r"objective\.terms\.lk_hybrid has no setting 'eta'"),
    ],
)
def test_mistakes_in_terms(terms, message):
    settings = composed()["objective"] | {"terms": terms}
    with pytest.raises(Exception, match=message):
        instantiate(settings)
