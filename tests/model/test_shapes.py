"""Random weights in the shape of real models have as many parameters, and are the same on every run."""

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from specdec.engine.engine import Engine
from specdec.lab.bench.random_weights import random_head, random_target, random_transformers
from specdec.model.archs import read_config
from specdec.model.target import Target
from specdec.trees import Chain

CONF = Path(__file__).parents[2] / "conf" / "shape"
CPU = torch.device("cpu")
# Parameters as the models' cards have them, in millions, the embedding counted once where it is tied.
MILLIONS = {"llama_3_2_1b": 1236, "llama_3_1_8b": 8030, "qwen3_1_7b": 1721, "gemma3_1b": 1000, "mobilellm_125m": 125}


def load(name: str) -> dict:
    return OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"))


@pytest.mark.parametrize("name", sorted({path.stem for path in CONF.glob("*.yaml")} - {"tiny"}))
def test_the_shapes_are_those_of_the_models(name):
    fields = load(name)["config"]
    config = read_config(fields, name)
    with torch.device("meta"):
        target = Target(config)
    count = sum(p.numel() for p in target.parameters()) - (target.head.weight.numel() if config.tied else 0)
    assert round(count / 1e6) == MILLIONS[name]
    theirs = random_transformers(fields, torch.bfloat16, torch.device("meta"))
    assert sum(p.numel() for p in theirs.parameters()) == count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_random_pair_decodes(dtype):
    shape = load("tiny")
    target = random_target(shape["config"], "tiny", dtype, CPU)
    head = random_head(target, **shape["drafter"])
    assert head.vocab.size == 50
    assert {p.dtype for p in head.parameters()} == {dtype}
    result = Engine(target, head, Chain(2)).generate([[1, 2, 3]], max_new_tokens=12)
    again = random_target(shape["config"], "tiny", dtype, CPU)
    assert all(torch.equal(a, b) for a, b in zip(target.parameters(), again.parameters(), strict=True))
    assert result.rows[0].tokens == Engine(again).generate([[1, 2, 3]], max_new_tokens=12).rows[0].tokens


@pytest.mark.parametrize("family", [{}, {"model_type": "gemma3_text", "head_dim": 16, "query_pre_attn_scalar": 16}])
def test_transformers_has_the_same_shape(family):
    config = load("tiny")["config"] | family | {"tie_word_embeddings": False}
    ours = random_target(config, "tiny", torch.float32, CPU)
    theirs = random_transformers(config, torch.float32, CPU)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    logits, _ = ours(torch.tensor([[1, 2, 3]]), None)
    assert logits.isfinite().all()
    assert logits.std() > 0
