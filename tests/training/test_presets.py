"""What the presets of other trainers set, and that every objective of conf/ can be built and trains."""

import pytest
import torch
from helpers import tiny_target
from hydra.utils import instantiate
from omegaconf import OmegaConf
from short_runs import CONF, batch, composed_alone

from specdec.drafters.eagle3 import spread_taps
from specdec.drafters.vocab import DraftVocab

OBJECTIVES = sorted(path.stem for path in (CONF / "objective").glob("*.yaml"))
TRAINED, FROZEN = (f"drafter.draft_vocab_size=32000 drafter.train_head={own} " for own in ("true", "false"))
MASKED = "objective.mean=masked objective.known_only=false "
TTT = TRAINED + (
    "objective.terms={ce:1.0} objective.mean=all objective.known_only=true objective.steps=7 objective.decay=0.8 "
    "objective.noise=0.0 trainer.clip=0.5 data.max_length=2048 "
)
ZLAB = "drafter.layers=5 trainer.lr=6e-4 trainer.muon_lr=null trainer.warmup=0.04 trainer.clip=1.0 "
BLOCKS = ZLAB + "drafter.block_size=16 trainer.epochs=6 data.max_length=3072 "
DFLASH = BLOCKS + "drafter.taps=5 drafter.label=p+k drafter.conditional=null objective.anchors=512 "
DEEPSPEC = "trainer.lr=6e-4 trainer.muon_lr=null trainer.warmup=0.04 trainer.clip=1.0 data.max_length=4096 "
SPECULATORS = FROZEN + (
    "objective.terms={kl:1.0} trainer.lr=1e-4 trainer.muon_lr=1e-3 trainer.schedule=linear trainer.clip=1.0 "
    "data.max_length=8192 "
)
PARD = (
    "trainer.lr=1e-5 trainer.epochs=4 trainer.warmup=0 trainer.schedule=constant trainer.muon_lr=null "
    "data.max_length=512 objective.counts=label "
)
# Settings as the trainers themselves state them (sources in the presets), and the steps or slots that a batch learns
PRESETS = {
    "eagle": (
        7, TTT + "trainer.lr=5e-5 trainer.steps=800000 trainer.warmup=12000 trainer.schedule=linear "
        "trainer.betas=[0.9,0.95]",
    ),
    "specforge": (7, TTT + "trainer.lr=1e-4 trainer.muon_lr=null trainer.warmup=0.015 trainer.schedule=cosine"),
    "speculators": (3, SPECULATORS + MASKED + "drafter.residual_norm=true objective.decay=1.0 objective.noise=0.1"),
    "modelopt": (
        4, TRAINED + MASKED + "objective.terms={ce:1.0} objective.decay=1.0 objective.noise=0.0 trainer.lr=5e-5 "
        "trainer.muon_lr=null trainer.warmup=0 trainer.schedule=linear trainer.clip=1.0",
    ),
    "deepspec": (
        7, DEEPSPEC + MASKED + "drafter.draft_vocab_size=null drafter.train_head=false drafter.taps=5 "
        "objective.terms={ce:1.0} objective.decay=0.8 objective.noise=0.0",
    ),
    "dflash": (
        15, DFLASH + "drafter.causal=false objective.terms={tokens:1.0} objective.where=next objective.counts=label "
        "objective.weights=exp objective.gamma=7.0",
    ),
    "dspark": (
        7, DEEPSPEC + "drafter.layers=5 drafter.taps=5 drafter.block_size=7 drafter.label=p+k+1 "
        "drafter.conditional=markov drafter.confidence=true objective.terms={tokens:0.1,l1:0.9} "
        "objective.anchors=512 objective.counts=prefix objective.gamma=4.0 objective.confidence=1.0 "
        "trainer.epochs=10 trainer.weight_decay=0.0",
    ),
    "domino": (
        16, BLOCKS + "drafter.label=p+k+1 drafter.conditional=domino drafter.head={state:1024,prefix:1} "
        "objective.terms={tokens:1.0} objective.anchors=256 objective.gamma=7.0 objective.base=1.0 "
        "objective.base_until=1.0",
    ),
    "jetspec": (
        15, DFLASH + "drafter.causal=true objective.terms={kl:1.0} objective.where=whole objective.weights=uniform "
        "objective.denominator=weights",
    ),
    "peagle": (
        8, SPECULATORS + "drafter.layers=4 drafter.taps=null drafter.block_size=8 objective.kept=0.7 "
        "objective.kept_min=0.2 objective.pool=learnt objective.counts=previous",
    ),
    "pard": (
        8, PARD + "drafter.block_size=8 drafter.taps=null objective.terms={tokens:1.0} objective.kept=0.7 "
        "objective.kept_min=0.2 objective.pool=all",
    ),
    "pard2": (
        16, PARD + "drafter.block_size=16 drafter.taps=4 drafter.scale=0.02 objective.kept_min=0.1 "
        "objective.weights=teacher objective.drop=0.2 objective.terms={tokens:0.1,kl:1.0}",
    ),
}  # fmt: skip
GROUPS = dict.fromkeys(("dflash", "domino", "jetspec"), "drafter=dflash objective=block")
GROUPS |= {"dspark": "drafter=dspark objective=block", "peagle": "drafter=peagle objective=parallel"}
GROUPS |= dict.fromkeys(("pard", "pard2"), "drafter=pard objective=parallel")


def composed(*overrides: str) -> dict:
    # `out` names the choice of drafter, which only a run of the command knows.
    return OmegaConf.to_container(composed_alone("train", *overrides, "out=runs/x"))


def prepared(config: dict, length: int = 20):
    """A tiny target, the drafter of a configuration for it, and an objective's inputs."""
    target = tiny_target(layers=8)
    settings = dict(config["drafter"])
    torch.manual_seed(1)
    vocab = DraftVocab(17, torch.arange(1, 17, 2) if settings.pop("draft_vocab_size") else None)
    drafter = instantiate(settings, target=target, vocab=vocab)
    inputs = batch(target, drafter, rows=3, length=length)
    drafter.first_tokens = inputs["tokens"][:, 0]
    return target, drafter, inputs | {"loss_mask": torch.ones(3, length)}


def test_every_preset_is_listed():
    assert {path.stem for path in (CONF / "experiment").glob("preset_*.yaml")} == {f"preset_{name}" for name in PRESETS}


@pytest.mark.parametrize("name", PRESETS)
def test_preset(name):
    """What it sets, that it takes no part of the recipe, and that all of its drafter learns from one batch."""
    learns, settings = PRESETS[name]
    config = composed(f"+experiment=preset_{name}")
    plain = composed(*GROUPS.get(name, "objective=eagle3").split(), "trainer=small")
    stated = OmegaConf.to_container(OmegaConf.from_dotlist([word.replace(":", ": ") for word in settings.split()]))
    for group, values in stated.items():
        assert {name: config[group].get(name) for name in values} == values
    for group in ("objective", "trainer", "data"):
        assert config[group].keys() == plain[group].keys(), "a preset sets what does not exist"
    assert (config["drafter"]["init"], config["objective"]["then"]) == ("random", None)
    assert config["trainer"]["batch_tokens"] == 4096
    assert config["objective"]["renormalise"]
    assert not config["drafter"].get("tap_norms", False)
    target, drafter, inputs = prepared(config)
    loss, metrics = instantiate(config["objective"])(drafter, **inputs)
    loss.backward()
    assert len(metrics["losses"]) == learns
    assert metrics["counted"] > 1
    if name in GROUPS:
        assert drafter.block == learns
    assert all(p.grad is not None for p in drafter.parameters() if p.requires_grad)
    if config["drafter"].get("train_head"):
        assert drafter.head.weight.grad.abs().max() > 0
    elif "train_head" in config["drafter"]:
        rows = slice(None) if drafter.vocab.ids is None else drafter.vocab.ids
        assert not drafter.head.weight.requires_grad
        assert torch.equal(drafter.head.weight, target.head.weight[rows])


def test_spread_taps():
    """Five of a 36-layer target: outputs of layers 1, 9, 17, 25, 33, which are hidden states one further on."""
    assert spread_taps(36, 5) == (2, 10, 18, 26, 34)
    with pytest.raises(ValueError, match="cannot spread 5 taps over a target of 6 layers"):
        spread_taps(6, 5)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_of_conf_learns(name):
    """A small step down the gradient lowers the loss by at least half of its length times the gradient's norm; not just
    by all of it, for what LK's hybrid holds constant is no constant. And every parameter is reached."""
    drafters = {"medusa": "medusa", "mtp": "mtp", "eagle": "eagle", "hass": "eagle", "block": "dflash"}
    config = composed(f"objective={name}", f"drafter={(drafters | {'parallel': 'peagle'}).get(name, 'eagle3')}")
    every_row = {"kept": 1.0, "kept_min": 1.0} if name == "parallel" else {}  # or each call learns others
    objective = instantiate(config["objective"] | {"noise": 0.0} | every_row)
    _, drafter, inputs = prepared(config, length=12)
    learners = [p for p in drafter.parameters() if p.requires_grad]

    def loss_and_grads():
        loss, _ = objective(drafter, **inputs)
        return loss.detach(), torch.autograd.grad(loss, learners, allow_unused=True, materialize_grads=True)

    (loss, grads), step = loss_and_grads(), 1e-2
    norm = torch.cat([g.flatten() for g in grads]).norm()
    with torch.no_grad():
        for parameter, grad in zip(learners, grads, strict=True):
            parameter -= step / norm * grad
    after, grads = loss_and_grads()
    assert loss - after > 0.5 * step * norm
    unread = {id(p) for p, grad in zip(learners, grads, strict=True) if not grad.any()}
    late = tuple(f"{part}.{i}." for part in ("blocks", "heads") for i in range(objective.steps, 9) if name == "medusa")
    assert [n for n, p in drafter.named_parameters() if id(p) in unread and not n.startswith(late)] == []
