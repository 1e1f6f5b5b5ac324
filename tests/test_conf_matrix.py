"""Every drafter x tree x sampling of conf/ decodes losslessly: a new YAML is tested without writing a test."""

import itertools
from pathlib import Path

import pytest
import torch
from helpers import pvalue_of_tokens_2_and_3, tiny_target
from hydra.utils import instantiate
from omegaconf import OmegaConf

from drafters.vocab import DraftVocab
from specdec.engine import Engine
from specdec.types import Sampling

CONF = Path(__file__).parents[1] / "conf"
NAMES = {group: sorted(p.stem for p in (CONF / group).glob("*.yaml")) for group in ("drafter", "tree", "sampling")}
PROMPTS = [[3, 5, 7], [1, 2]]


def load(group: str, name: str) -> dict:
    return OmegaConf.to_container(OmegaConf.load(CONF / group / f"{name}.yaml"))


def fresh_drafter(name: str, target, draft_vocab: int | None = 12):
    """The drafter that a YAML describes, random, for a tiny target; its vocabulary leaves some tokens out."""
    settings = load("drafter", name)
    if settings.pop("draft_vocab_size", None) is None:
        draft_vocab = None
    torch.manual_seed(1)
    vocab = DraftVocab(target.config.vocab, None if draft_vocab is None else torch.arange(1, draft_vocab + 1))
    return instantiate(settings, target=target, vocab=vocab).eval()


@pytest.mark.parametrize(("drafter", "tree", "sampling"), itertools.product(*NAMES.values()))
def test_pair(drafter, tree, sampling):
    target = tiny_target()
    engine = Engine(target, fresh_drafter(drafter, target), instantiate(load("tree", tree)))
    setting: Sampling = instantiate(load("sampling", sampling))
    if setting.greedy:
        plain = Engine(target).generate(PROMPTS, max_new_tokens=40)
        fast = engine.generate(PROMPTS, max_new_tokens=40)
        assert [r.tokens for r in fast.rows] == [r.tokens for r in plain.rows]
        return
    # Tokens 2 and 3 are decided by trees; 3000 rows with independent noise in one batch, seeded.
    result = engine.generate([[3, 5, 7]] * 3000, max_new_tokens=3, sampling=setting, seed=5)
    assert pvalue_of_tokens_2_and_3(target, [3, 5, 7], setting, result) > 1e-3
