"""Every fitting drafter x tree x verifier x sampling of conf/ decodes losslessly. A new YAML file needs no new test."""

import functools
import itertools
import tempfile
from pathlib import Path

import pytest
import torch
from helpers import joint_of_tokens_2_and_3, pvalue_against, save_hf, texts_of, tiny_target
from hydra.utils import instantiate
from omegaconf import OmegaConf

from specdec import Engine, Sampling
from specdec.drafters.vocab import DraftVocab
from specdec.lab.proof.laws import significance
from specdec.verify import TwoThresholds

CONF = Path(__file__).parents[2] / "conf"
NAMES = {
    group: sorted(p.stem for p in (CONF / group).glob("*.yaml"))
    for group in ("drafter", "tree", "sampling", "verifier")
}
NAMES["drafter"].remove("saved")  # the drafter of a checkpoint, which is of one of the other kinds
PROMPTS, PROMPT, ROWS = [[3, 5, 7], [1, 2]], [3, 5, 7], 1000


@functools.cache
def read(group: str, name: str):
    return OmegaConf.load(CONF / group / f"{name}.yaml")


def load(group: str, name: str) -> dict:
    return OmegaConf.to_container(read(group, name))


@functools.cache
def frozen(group: str, name: str):
    """A sampling or a rule, which never change."""
    return instantiate(load(group, name))


@functools.cache
def shared_target():
    """One target for all cases, as engines do not change it."""
    return tiny_target(vocab=11)


@functools.cache
def saved_model(vocab: int, **fields) -> tempfile.TemporaryDirectory:
    """Return the folder of a random model, removed when the process ends. fields: of its config."""
    folder = tempfile.TemporaryDirectory()
    save_hf(folder.name, "llama", vocab_size=vocab, max_position_embeddings=256, head=8.0, **fields)
    return folder


def fresh_drafter(name: str, target, draft_vocab: int | None = 8, **fields):
    """Return a random drafter as a YAML file describes it; its vocabulary leaves tokens out. fields: of a draft model's
    config."""
    settings = load("drafter", name)
    if settings.pop("draft_vocab_size", None) is None:
        draft_vocab = None
    if "block_size" in settings:
        settings |= {"block_size": 8, "layers": 2}
    if (settings.get("head") or {}).get("candidates"):
        settings["head"] = {"candidates": 4}  # fewer than there are tokens
    torch.manual_seed(1)
    vocab = DraftVocab(target.config.vocab, None if draft_vocab is None else torch.arange(1, draft_vocab + 1))
    if settings.get("path", "none needed") is not None:
        return instantiate(settings, target=target, vocab=vocab).eval()
    path = saved_model(target.config.vocab, **fields).name  # a model of its own: any that has the vocabulary
    return instantiate(settings | {"path": path}, target=target, vocab=vocab).eval()


def fits(tree: str, verifier: str) -> bool:
    policy, rule = instantiate(load("tree", tree)), frozen("verifier", verifier)
    return (policy.samples or not rule.needs_q) and (policy.topk == 1 or not rule.chains_only)


PAIRS = [pair for pair in itertools.product(NAMES["tree"], NAMES["verifier"]) if fits(*pair)]
CASES = [
    (tree, verifier, sampling)
    for (tree, verifier), sampling in itertools.product(PAIRS, NAMES["sampling"])
    if frozen("verifier", verifier).lossless or frozen("sampling", sampling).greedy
]


@functools.cache
def plain_text(sampling: Sampling) -> list[list[int]]:
    return texts_of(Engine(shared_target()), PROMPTS, max_new_tokens=20, sampling=sampling)


@functools.cache
def law(sampling: Sampling) -> torch.Tensor:
    return joint_of_tokens_2_and_3(shared_target(), PROMPT, sampling)


def takes(tree: str, drafter: str) -> bool:
    """Trees over marginals are for blocks whose slots do not depend on each other's tokens."""
    if not instantiate(load("tree", tree)).marginals:
        return True
    made = fresh_drafter(drafter, shared_target())
    return made.block is not None and not made.conditioned


DRAFTED = [(d, tree) for tree in NAMES["tree"] for d in NAMES["drafter"] if takes(tree, d)]  # what fits together
MATRIX = [(drafter, *case) for drafter, tree in DRAFTED for case in CASES if case[0] == tree]
NO_ACCIDENT = significance(len(MATRIX))


@pytest.mark.matrix
@pytest.mark.parametrize(("drafter", "tree", "verifier", "sampling"), MATRIX)
def test_fitting(drafter, tree, verifier, sampling):
    """Greedy text, and text sampled by the default rule, is that of plain decoding. By the other lossless rules,
    tokens 2 and 3 follow their exact joint distribution."""
    setting: Sampling = frozen("sampling", sampling)
    target = shared_target()
    policy, rule = instantiate(load("tree", tree)), frozen("verifier", verifier)
    engine = Engine(target, fresh_drafter(drafter, target), policy, rule)
    if setting.greedy or verifier == "match":
        assert texts_of(engine, PROMPTS, max_new_tokens=20, sampling=setting) == plain_text(setting)
        return
    result = engine.generate([PROMPT] * ROWS, max_new_tokens=3, sampling=setting, seed=5)
    assert pvalue_against(law(setting), result) > NO_ACCIDENT


OF_ANY = [tree for tree in NAMES["tree"] if takes(tree, "eagle3")]


@pytest.mark.parametrize("tree", OF_ANY)
def test_so_few_rows_find_a_lossy_rule_out(tree):
    target, setting = shared_target(), frozen("sampling", "temperature")
    policy, lossy = instantiate(load("tree", tree)), TwoThresholds(threshold_acc=0.5)
    engine = Engine(target, fresh_drafter("eagle3", target), policy, lossy)
    result = engine.generate([PROMPT] * ROWS, max_new_tokens=3, sampling=setting, seed=5)
    assert pvalue_against(law(setting), result) < NO_ACCIDENT


def test_what_does_not_fit_is_refused():
    target = tiny_target()
    for tree, verifier in set(itertools.product(NAMES["tree"], NAMES["verifier"])) - set(PAIRS):
        policy, rule = instantiate(load("tree", tree)), instantiate(load("verifier", verifier))
        drafter = fresh_drafter("dflash" if policy.marginals else "eagle3", target)
        with pytest.raises(ValueError, match=r"does not draw them|verifies chains only"):
            Engine(target, drafter, policy, rule)
    for tree, drafter in itertools.product(NAMES["tree"], NAMES["drafter"]):
        if not takes(tree, drafter):
            with pytest.raises(ValueError, match=r"takes drafters that guess a block|slots of a block for independent"):
                Engine(target, fresh_drafter(drafter, target), instantiate(load("tree", tree)))
