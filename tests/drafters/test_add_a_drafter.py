"""docs/add_a_drafter.md is run as it stands: the toy drafter trains, saves, loads, and decodes losslessly."""

import re
import sys
from pathlib import Path

import pytest
import torch
from helpers import pvalue_of_tokens_2_and_3, tiny_target
from hydra.utils import instantiate
from omegaconf import OmegaConf

from specdec import drafters
from specdec.drafters.formats import load_drafter, save_drafter
from specdec.engine.engine import Engine
from specdec.structs import Sampling
from specdec.training.objectives.eagle3 import Eagle3Objective
from specdec.trees import Chain, DynamicTree

PAGE = Path(__file__).parents[2] / "docs" / "add_a_drafter.md"
BLOCK = re.compile(r"```\w+ file=(\S+)\n(.*?)```", re.DOTALL)


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """The page's files, written where `drafters` finds them; its YAML."""
    files = dict(BLOCK.findall(PAGE.read_text(encoding="utf-8")))
    assert set(files) == {"drafters/toy.py", "conf/drafter/toy.yaml"}
    assert len(files["drafters/toy.py"].strip().splitlines()) <= 42
    (tmp_path / "toy.py").write_text(files["drafters/toy.py"])
    monkeypatch.setattr(drafters, "__path__", [*drafters.__path__, str(tmp_path)])
    yield OmegaConf.to_container(OmegaConf.create(files["conf/drafter/toy.yaml"]))
    sys.modules.pop("specdec.drafters.toy", None)


def test_the_page(recipe, tmp_path):
    target = tiny_target()
    settings = {k: v for k, v in recipe.items() if k != "draft_vocab_size"}
    torch.manual_seed(0)
    drafter = instantiate(settings, target=target)
    drafter.recipe = settings
    tokens = torch.randint(17, (4, 12))
    with torch.no_grad():
        logits, feats = target(tokens, None, taps=drafter.taps)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    losses = []
    for _ in range(20):
        loss, _ = Eagle3Objective(steps=3)(drafter, feats, tokens, logits, torch.ones(4, 12))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    save_drafter(drafter, tmp_path / "draft", target)
    loaded = load_drafter(tmp_path / "draft", target)
    assert all(torch.equal(a, b) for a, b in zip(drafter.parameters(), loaded.parameters(), strict=True))
    prompts = [[3, 5, 7], [1, 2]]
    plain = Engine(target).generate(prompts, max_new_tokens=40)
    for tree in (Chain(4), DynamicTree(3, 3, 10)):
        fast = Engine(target, loaded, tree).generate(prompts, max_new_tokens=40)
        assert [r.tokens for r in fast.rows] == [r.tokens for r in plain.rows]
    sampling = Sampling(temperature=1.0)
    rows = Engine(target, loaded, Chain(3)).generate([[3, 5, 7]] * 3000, max_new_tokens=3, sampling=sampling, seed=5)
    assert pvalue_of_tokens_2_and_3(target, [3, 5, 7], sampling, rows) > 1e-3


def test_a_checkpoint_does_not_choose_what_code_runs(recipe, tmp_path):
    target = tiny_target()
    drafter = instantiate({k: v for k, v in recipe.items() if k != "draft_vocab_size"}, target=target)
    for named in ("os.system", "specdec.drafters.formats.load_drafter", "specdec.drafters.ngram.os.system", "create"):
        drafter.recipe = {"_target_": named, "command": "true"}
        save_drafter(drafter, tmp_path / "draft", target)
        with pytest.raises(ValueError, match=r"must be the function `create` of a file in drafters/"):
            load_drafter(tmp_path / "draft", target)
