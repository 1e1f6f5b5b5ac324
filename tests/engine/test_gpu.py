"""On a GPU: a round never synchronises, and greedy text in fp32 is plain decoding's."""

import pytest
import torch
from helpers import DRAFTERS, tiny_target

from specdec.engine.batch import Batch
from specdec.engine.engine import Engine
from specdec.engine.report import Clock
from specdec.engine.sequence import Sequence
from specdec.structs import Sampling
from specdec.trees import Chain, DynamicTree, StaticTree

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
POLICIES = {
    "chain": Chain(3),
    "dynamic": DynamicTree(3, 3, 9),
    "static": StaticTree([[0], [1], [0, 0], [0, 2], [1, 0], [0, 2, 0]]),
}


def engine_on_gpu(policy: str, drafter: str) -> Engine:
    target = tiny_target().to("cuda")
    return Engine(target, DRAFTERS[drafter](target).to("cuda"), POLICIES[policy])


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, 5, 0.9, 0.02)], ids=["greedy", "sampled"])
@torch.inference_mode()
def test_round_does_not_synchronise(policy, sampling, drafter):
    engine = engine_on_gpu(policy, drafter)
    batch = Batch(engine.round, 2, 24, Clock(engine.device), overlap=True)
    batch.admit([Sequence(prompt, 20, sampling=sampling) for prompt in ([1, 2, 3], [4])])
    batch.launch(3, ())  # the libraries are warm now
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch.launch(7, ())
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_greedy_text_is_plain_decodings(policy, drafter):
    engine = engine_on_gpu(policy, drafter)
    prompts = [[3, 5, 7], [1], [2, 4, 6, 8]]
    fast = engine.generate(prompts, max_new_tokens=40).rows
    plain = Engine(engine.target).generate(prompts, max_new_tokens=40).rows
    assert [row.tokens for row in fast] == [row.tokens for row in plain]
