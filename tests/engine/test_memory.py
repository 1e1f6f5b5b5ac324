"""The plan of a request's memory: exact for caches, an upper bound for the work, and a refusal with the numbers."""

import weakref
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from helpers import DRAFTERS, save_hf, tiny_drafter, tiny_target
from tape import Tape, tensors
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from specdec import Engine, Sampling
from specdec.engine import memory
from specdec.engine.memory import GIB, SMALL, MemoryPlan, Request, check, free_bytes, plan
from specdec.engine.round import Round
from specdec.model.hf_target import TransformersTarget
from specdec.model.target import Target
from specdec.ops import attention
from specdec.trees import Chain, DynamicTree, SampledTree
from specdec.verify import make_verifier, sample_and_match


class Live(TorchDispatchMode):
    """Counts the bytes of living tensors that operators made, now and at most."""

    def __init__(self):
        super().__init__()
        self.now, self.most, self.seen = 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tensors((args, kwargs))}
        for x in tensors(out):
            storage = x.untyped_storage()
            if storage._cdata not in self.seen | given:
                self.seen.add(storage._cdata)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self.gone, storage._cdata, storage.nbytes())
        return out

    def gone(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_caches_to_the_byte(drafter):
    target = tiny_target()
    drafter = DRAFTERS[drafter](target)
    wanted = plan(Round(target, drafter, DynamicTree(3, 3, 9), sample_and_match), Request(batch=2, prompt=5, room=40))
    # Embeddings, and for some the head, are the target's.
    own = {p.data_ptr(): p.nbytes for m in (target, drafter) for p in (*m.parameters(), *m.buffers())}
    assert wanted.weights == sum(own.values())
    assert wanted.target_cache == sum(kv.nbytes for kv in target.new_cache(2, 40 + 4 + 9).layers)
    drafter.reset(2, 40 + 4 + 6)
    allocated = 0 if drafter.cache is None else sum(kv.nbytes for kv in drafter.cache.memory)
    assert wanted.draft_cache == allocated


def test_the_work_by_hand():
    """Layers, masks, logits, a draft level and small parts; then what draws and penalties add."""
    target, size = tiny_target(), Request(batch=2, prompt=5, room=40)
    wanted = plan(Engine(target, tiny_drafter(target), TREE).round, size)
    assert wanted.round == 48 * 5824 + 48 * 69 * 4 * 5 + 48 * 17 * 4 + 2 * 4 * 17 * 16 + 2**20 + 13248
    assert wanted.graphs == 0
    plain = Round(target, None, None, sample_and_match)
    work = 2 * 3776 + 2 * 42 * 4 * 5 + 34 * 4 + 2**20 + 8064
    requests = size, replace(size, penalised=True), replace(size, greedy=False)
    assert [plan(plain, x).round - work for x in requests] == [0, 34 * 32, 34 * 56 + 34 * 12]


def test_caches_of_the_adapter_and_workspaces(tmp_path, monkeypatch):
    """cuBLAS workspaces follow torch's `parseChosenWorkspaceSize`."""
    target = TransformersTarget(save_hf(tmp_path, "gpt_neox"))
    wanted = plan(Round(target, None, None, sample_and_match), Request(batch=3, prompt=5, room=20))
    assert wanted.target_cache == sum(kv.nbytes for kv in target.new_cache(3, 22).layers)
    assert wanted.draft_cache == wanted.libraries == 0  # there are no libraries on the CPU
    for setting, size in ((":4096:2:16:8", 8 * 2**20 + 128 * 2**10), (":16:8", 128 * 2**10), ("", 32 * 2**20)):
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", setting)
        assert memory.cublas_workspace() == size


SAMPLED = Sampling(0.8, 5, 0.9, 0.02)
PENALISED = Sampling(0.8, 5, 0.9, 0.02, 1.2, 0.5, 0.5)
TREE, SAMPLED_TREE = DynamicTree(4, 4, 24), SampledTree((3, 2, 1))
CASES = [
    (None, None, "match", Sampling(), 200),
    (None, None, "match", PENALISED, 10),
    ("eagle3", TREE, "match", Sampling(), 10),
    ("eagle3", TREE, "match", Sampling(), 300),
    ("eagle3", TREE, "match", PENALISED, 10),
    ("eagle3", TREE, "sglang", SAMPLED, 10),
    ("eagle3", TREE, "typical", SAMPLED, 10),
    ("eagle3", SAMPLED_TREE, "rejection", SAMPLED, 10),
    ("eagle3", Chain(1), "match", SAMPLED, 10),
    ("mtp-three-heads", TREE, "match", Sampling(), 300),
    ("medusa", TREE, "match", Sampling(), 300),
    ("draft-model", TREE, "match", Sampling(), 100),
    ("suffix", TREE, "match", SAMPLED, 300),
]


@pytest.mark.matrix
@pytest.mark.parametrize("vocab", [17, 3000])
@pytest.mark.parametrize(("drafter", "tree", "verifier", "sampling", "length"), CASES)
def test_the_work_stays_below_the_bound(drafter, tree, verifier, sampling, length, vocab):
    """The bound is at most four times what is taken."""
    if drafter == "draft-model" and vocab != 17:
        pytest.skip("the small draft model has 17 tokens")
    target = tiny_target(vocab=vocab, context=512)
    model = drafter and DRAFTERS[drafter](target)
    engine = Engine(target, model, tree, make_verifier(verifier))
    prompts = [[1 + i % 9 for i in range(length)], [3] * (length // 2)]
    engine.generate(prompts, max_new_tokens=1)  # tables of positions are made once
    with Live() as live:
        engine.generate(prompts, max_new_tokens=8, sampling=sampling, eos=frozenset())
    wanted = plan(engine.round, Request(2, length, length + 8, sampling.greedy, sampling.penalised))
    assert live.most <= wanted.needed
    assert wanted.needed - SMALL <= 4 * live.most


ATTENTION = torch.ops.aten.scaled_dot_product_attention, torch.ops.aten._scaled_dot_product_attention_math


class Inside(Live):
    """Counts what attention makes inside, too."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in ATTENTION:
            with self:
                return func.decompose(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize("window", [None, 200], ids=["full", "window"])
@pytest.mark.parametrize("kind", ["drafter", "plain", "repeated"])
def test_attention_that_is_not_fused(monkeypatch, kind, window):
    """As on a GPU in fp32 with fewer key heads than query heads: attention writes scores, or gets keys and
    values that are repeated for every query head."""
    config = tiny_target(context=512).config
    config = replace(config, heads=16, intermediate=16) if kind == "repeated" else config
    target = Target(replace(config, sliding=(True,) * config.layers, window=window) if window else config).eval()
    engine, request = Engine(target, *((tiny_drafter(target), TREE) if kind == "drafter" else ())), Request(2, 400, 408)
    before, prompts = plan(engine.round, request), [[1 + i % 9 for i in range(400)], [3] * 200]
    if kind == "repeated":
        for module in (attention, memory):
            monkeypatch.setattr(module, "shares_key_heads", lambda q, masked: False)
    with nullcontext() if kind == "repeated" else sdpa_kernel(SDPBackend.MATH), Inside() as live:
        engine.generate(prompts, max_new_tokens=8, eos=frozenset())
    if kind != "repeated":
        assert live.most > before.needed  # without the scores it is too low
        monkeypatch.setattr(memory, "has_fused_attention", lambda target, masked: False)
    wanted = plan(engine.round, request)
    assert kind != "repeated" or wanted.prefill - before.prefill == 2 * 400 * 2 * 16 * 8 * 4
    assert live.most <= wanted.needed
    assert wanted.needed - SMALL <= 4 * live.most


def test_free_memory_is_looked_for_as_far_as_needed(monkeypatch):
    """The driver's first, then what torch holds unused, then the pools of graphs that are gone."""

    def segment(total: int, active: int, pool: tuple[int, int] = (0, 0), device: int = 0) -> dict:
        return {"device": device, "segment_pool_id": pool, "total_size": total, "active_size": active}

    device, asked, driver = torch.device("cuda", 0), [], [100]
    segments = [segment(50, 20), segment(300, 0, (0, 1)), segment(9, 9), segment(400, 0, device=1)]

    def empty_cache() -> None:
        asked.append("emptied")
        driver[0] += 300
        del segments[1]

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (driver[0], 2000))
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: asked.append("snapshot") or segments)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    for wanted, free, calls in (
        (100, 100, []),
        (130, 130, ["snapshot"]),
        (131, 430, ["snapshot", "emptied", "snapshot"]),
    ):
        asked.clear()
        assert (free_bytes(device, wanted), asked) == (free, calls)


def test_what_fits_and_what_does_not():
    request = MemoryPlan(
        weights=8 * GIB, target_cache=GIB, draft_cache=GIB // 2, prefill=GIB // 8, round=GIB // 16, graphs=GIB,
        libraries=GIB // 8,
    )  # fmt: skip
    check(request, free=request.needed)
    with pytest.raises(ValueError, match=r"needs 2\.75 GiB \(1\.00 for the target's cache, 0\.50 .*, up to 1\.25 for"):
        check(request, free=request.needed - 1)
    check(request, free=GIB // 4, allocated=True)
    with pytest.raises(ValueError, match=r"0\.25 GiB are free after 8\.00 GiB of weights; take fewer rows"):
        check(request, free=GIB // 4 - 1, allocated=True)


@pytest.mark.parametrize("graphs", [None, Tape()])
def test_refused_before_anything_is_allocated(monkeypatch, graphs):
    target = tiny_target()
    engine = Engine(target, tiny_drafter(target), DynamicTree(3, 3, 9), graphs=graphs, prefixes=10**5)
    monkeypatch.setattr(memory, "is_limited", lambda device: True)
    monkeypatch.setattr(memory, "free_bytes", lambda device, wanted: 10**6)
    with monkeypatch.context() as patch:
        patch.setattr(target, "new_cache", lambda *sizes: pytest.fail("a cache was allocated"))
        with pytest.raises(ValueError, match=r"this request does not fit: it needs 0\.\d\d"):
            engine.generate([[1, 2, 3]] * 40, max_new_tokens=200)
    asked, held = [], []

    def free(device, wanted):
        asked.append(wanted)
        held.append(engine.drafter.cache.all_lens.numel())
        return 10**9

    monkeypatch.setattr(memory, "free_bytes", free)
    for _ in range(2):
        assert len(engine.generate([[1] * 40] * 3, max_new_tokens=5).rows[0].tokens) == 5
    if graphs is not None:
        assert asked[1] < asked[0], "graphs keep the caches for the second call"
    else:
        assert asked[0] - asked[1] == engine.prefixes.bytes > 0, "stored prefixes need no more memory"
        assert held == [1, 1], "the drafter holds the cache of the first call"
