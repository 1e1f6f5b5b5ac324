"""On a GPU: a round never synchronises, and greedy text in fp32 is plain decoding's.

Replayed rounds emit what eager ones do, never wait for the device, and take no memory twice.
"""

from functools import partial

import pytest
import torch
from helpers import DRAFTERS, LEARNERS, texts_of, tiny_drafter, tiny_target
from test_graphs import POLICIES as TREES
from test_overlap import SAMPLED, assert_same, outcome

from specdec import Engine, Sampling, ops
from specdec.engine import batch, loop
from specdec.engine.batch import Batch
from specdec.engine.memory import Request, free_bytes, has_fused_attention, plan, unused_bytes
from specdec.engine.report import Clock
from specdec.engine.sequence import Sequence
from specdec.trees import DynamicTree, SampledTree
from specdec.verify import VERIFIERS, make_verifier

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
POLICIES = {name: TREES[name] for name in ("chain", "dynamic", "static", "sampled")}
POLICIES["chain of draws"] = SampledTree((1, 1))


def parts(drafter: str | None = "eagle3", policy: str = "dynamic") -> tuple:
    target = tiny_target().to("cuda")
    return (target, DRAFTERS[drafter](target).to("cuda"), POLICIES[policy]) if drafter else (target,)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("policy", ["chain", "dynamic", "static"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, 5, 0.9, 0.02)], ids=["greedy", "sampled"])
@torch.inference_mode()
def test_round_does_not_synchronise(policy, sampling, drafter):
    engine = Engine(*parts(drafter, policy))
    batch = Batch(engine.round, 2, 24, Clock(engine.device), overlap=True)
    batch.admit([Sequence(prompt, 20, sampling=sampling) for prompt in ([1, 2, 3], [4])])
    batch.launch(3, ())  # the libraries are warm now
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch.launch(7, ())
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("policy", ["chain", "dynamic", "static"])
def test_greedy_text_is_plain_decodings(policy, drafter):
    engine = Engine(*parts(drafter, policy))
    how = {"prompts": [[3, 5, 7], [1], [2, 4, 6, 8]], "max_new_tokens": 40}
    assert texts_of(engine, **how) == texts_of(Engine(engine.target), **how)


launching = partial(Engine, graphs=False, compact=False)  # rows that have ended are carried along, as in replays


# With the same seed also with sampling: a replay uses the noise that the eager round would have used.
MIXED = [Sampling(0.5, repetition_penalty=1.5), SAMPLED, Sampling(frequency_penalty=1.5)]
CASES = [(drafter, policy, "match") for drafter in [*LEARNERS, "draft-model"] for policy in [*POLICIES][:4]]
CASES += [(None, "chain", "match"), *(("eagle3", "sampled", name) for name in VERIFIERS if name != "block")]
CASES += [("eagle3", "chain of draws", "block")]


@pytest.mark.parametrize(("drafter", "policy", "verifier"), CASES)
def test_as_without_graphs(drafter, policy, verifier):
    pair = parts(drafter, policy) + (() if drafter is None else (make_verifier(verifier),))
    replayed, eager = Engine(*pair), launching(*pair)
    assert replayed.graphs is not None
    for sampling in (Sampling(), SAMPLED, *[MIXED] * (policy == "dynamic")):
        for seed in (0, 1):  # captures, and replays from the beginning
            how = {"sampling": sampling, "seed": seed, "logprobs": sampling is MIXED}
            assert_same(*(outcome(engine, **how) for engine in (replayed, eager)))


@pytest.mark.parametrize("drafter", [None, "eagle3"])
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_rounds_that_are_compiled_first(drafter, sampling):
    """Of torch's operators: Triton's kernels are none of Inductor's graphs."""
    ops.use("torch")
    try:
        pair = parts(drafter)
        compiled = Engine(*pair, compile=True)
        for seed in (0, 1):
            results = [outcome(engine, sampling=sampling, seed=seed) for engine in (compiled, launching(*pair))]
            assert_same(*results)
    finally:
        ops.use("auto")


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_replays_do_not_synchronise(monkeypatch, sampling):
    """Between two readings the host only starts a round and its copy."""
    engine = Engine(*parts())
    how = {"prompts": [[3, 5, 7], [1]], "max_new_tokens": 20, "sampling": sampling}
    engine.generate(**how)

    def guard(owner: type, name: str) -> None:
        function = getattr(owner, name)

        def guarded(*inputs):
            torch.cuda.set_sync_debug_mode("error")
            try:
                return function(*inputs)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        monkeypatch.setattr(owner, name, guarded)

    guard(batch.Batch, "launch")
    guard(loop.Reader, "start")
    engine.generate(**how)


def test_memory_stays_flat():
    engine = Engine(*parts())
    held = []
    for seed in range(6):
        engine.generate([[3, 5, 7], [1]], max_new_tokens=30 + seed, sampling=SAMPLED, seed=seed)
        torch.cuda.synchronize()
        held.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert len(set(held[1:])) == 1
    assert len(engine.graphs.batch.graphs) == 1


def test_one_engine_forgets_and_another_goes_on():
    """Graphs of two engines come from one stream. Those of the first go, and what they held is given to others."""
    plain, pair = Engine(*parts(None)), Engine(*parts())
    how = {"prompts": [[3, 5, 7], [1]], "max_new_tokens": 30, "eos": frozenset()}
    expected = outcome(plain, **how)
    outcome(pair, **how)
    outcome(pair, **(how | {"prompts": [[2], [4], [6]]}))  # more rows: its graphs are made anew
    del pair
    torch.cuda.empty_cache()
    others = [torch.full((2**20,), torch.nan, device="cuda") for _ in range(64)]
    assert_same(outcome(plain, **how), expected)
    assert all(x.isnan().all() for x in others)


def test_pools_of_graphs_are_distinguished():
    """Torch's snapshot has the fields that are counted with, and the engine's pool is one of its own."""
    engine = Engine(*parts())
    engine.generate([[3, 5, 7]], max_new_tokens=10)
    torch.cuda.synchronize()
    segments = [s for s in torch.cuda.memory_snapshot() if s["device"] == 0]
    in_pools = [s for s in segments if tuple(s["segment_pool_id"]) != (0, 0)]
    assert in_pools
    assert sum(s["total_size"] for s in segments) == torch.cuda.memory_reserved()
    inside = sum(s["total_size"] - s["active_size"] for s in in_pools)
    unused = sum(s["total_size"] - s["active_size"] for s in segments)
    assert 0 < unused_bytes(segments, 0) + inside == unused
    assert free_bytes(torch.device("cuda", 0), 1) <= torch.cuda.get_device_properties(0).total_memory


def test_torch_is_asked_whether_attention_is_fused():
    """Two query heads share a key head here: in fp32 none of torch's kernels takes that, in bf16 one does."""
    target = tiny_target().to("cuda")
    assert not has_fused_attention(target, masked=False)
    assert has_fused_attention(target.to(torch.bfloat16), masked=False)


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_the_plan_bounds_what_is_taken(sampling):
    """Counted as it was asked for: torch's allocator rounds requests up, and hands out larger blocks that it has."""
    target = tiny_target(vocab=20_000, context=2048).to("cuda")
    drafter = tiny_drafter(target).to("cuda")
    tree = DynamicTree(4, 4, 24)
    engine = Engine(target, drafter, tree)
    engine.generate([[1, 2]], max_new_tokens=20, sampling=sampling)  # tables of positions are made once
    engine = Engine(target, drafter, tree)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    prompts = [[1 + i % 9 for i in range(700)], [3] * 400]
    engine.generate(prompts, max_new_tokens=40, sampling=sampling)
    wanted = plan(engine.round, Request(2, 700, 768, sampling.greedy), graphs=True)
    assert torch.cuda.memory_stats()["requested_bytes.all.peak"] - before <= wanted.needed


def test_what_cannot_fit_is_refused():
    engine = Engine(tiny_target(context=100_000).to("cuda"))  # 37 MB of cache for a row
    before = torch.cuda.memory_allocated()
    with pytest.raises(ValueError, match=r"this request does not fit: it needs .* GiB are free"):
        engine.generate([[1, 2, 3]] * 20_000, max_new_tokens=99_000)
    assert torch.cuda.memory_allocated() == before
