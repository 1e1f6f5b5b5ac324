"""The plan of a request's memory: exact for caches, an upper bound for the work, and a refusal with the numbers."""

import weakref

import pytest
import torch
from helpers import DRAFTERS, save_hf, tiny_drafter, tiny_target
from tape import Tape, tensors
from torch.utils._python_dispatch import TorchDispatchMode

from drafters.ngram import NGram
from specdec.engine import engine as engines
from specdec.engine.engine import Engine
from specdec.engine.memory import GIB, SMALL, Plan, Request, check, plan
from specdec.engine.round import Round
from specdec.model.hf_target import TransformersTarget
from specdec.types import Sampling
from specdec.verify import make_verifier, sample_and_match
from trees import Chain, DynamicTree, SampledTree


class Live(TorchDispatchMode):
    """Bytes that live in tensors which operators have made, now and at most."""

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
    round_ = Round(target, drafter, DynamicTree(3, 3, 9), sample_and_match)
    wanted = plan(round_, Request(batch=2, prompt=5, room=40))
    # Embeddings, and for some the head, are the target's.
    own = {p.data_ptr(): p.nbytes for m in (target, drafter) for p in (*m.parameters(), *m.buffers())}
    assert wanted.weights == sum(own.values())
    cache = target.new_cache(2, 40 + 4 + 9)
    assert wanted.target_cache == sum(kv.nbytes for kv in cache.layers)
    drafter.reset(2, 40 + 4 + 6)
    kept = 0 if drafter.cache is None else sum(kv.nbytes for kv in drafter.cache.memory)
    if isinstance(drafter, NGram):  # it keeps the texts themselves, from the first row on
        drafter.admit(0, torch.tensor([1]), None, torch.tensor([[2]]), torch.tensor([1]))
        kept = drafter.memory.nbytes
    assert wanted.draft_cache == kept


def test_the_adapters_cache(tmp_path):
    target = TransformersTarget(save_hf(tmp_path, "gpt_neox"))
    wanted = plan(Round(target, None, None, sample_and_match), Request(batch=3, prompt=5, room=20))
    assert wanted.target_cache == sum(kv.nbytes for kv in target.new_cache(3, 22).layers)
    assert wanted.draft_cache == 0


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


@pytest.mark.parametrize("vocab", [17, 3000])
@pytest.mark.parametrize(("drafter", "tree", "verifier", "sampling", "length"), CASES)
def test_the_work_stays_below_the_bound(drafter, tree, verifier, sampling, length, vocab):
    """Long prompts and short ones, trees that are wide beside them, a vocabulary that is little or nearly all of it;
    and the bound is not so high that it refuses what would fit more than four times."""
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


def test_what_fits_and_what_does_not():
    request = Plan(
        weights=8 * GIB, target_cache=GIB, draft_cache=GIB // 2, prefill=GIB // 4, round=GIB // 8, graphs=GIB
    )
    check(request, free=request.needed)
    with pytest.raises(ValueError, match=r"needs 2\.75 GiB \(1\.00 for the target's cache, 0\.50 .*, up to 1\.25 for"):
        check(request, free=request.needed - 1)
    check(request, free=GIB // 4, kept=True)
    with pytest.raises(ValueError, match=r"beside 8\.00 GiB of weights 0\.25 GiB are free; take fewer rows"):
        check(request, free=GIB // 4 - 1, kept=True)


@pytest.mark.parametrize("graphs", [None, Tape()])
def test_refused_before_anything_is_allocated(monkeypatch, graphs):
    target = tiny_target()
    engine = Engine(target, tiny_drafter(target), DynamicTree(3, 3, 9), graphs=graphs)
    monkeypatch.setattr(engines, "is_limited", lambda device: True)
    monkeypatch.setattr(engines, "free_bytes", lambda device, wanted: 10**6)
    with monkeypatch.context() as patch:
        patch.setattr(target, "new_cache", lambda *sizes: pytest.fail("a cache was allocated"))
        with pytest.raises(ValueError, match=r"this request does not fit: it needs 0\.\d\d"):
            engine.generate([[1, 2, 3]] * 40, max_new_tokens=200)
    monkeypatch.setattr(engines, "free_bytes", lambda device, wanted: 10**9)
    assert len(engine.generate([[1, 2, 3]], max_new_tokens=5).rows[0].tokens) == 5
