"""Cached features: what online features are, within the storage's rounding; whole or not there; of this target only."""

import json
import re
import shutil
from contextlib import nullcontext
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from helpers import tiny_drafter, tiny_target
from safetensors.torch import load_file
from short_runs import composed, composed_alone, contents, logged, refused

from specdec.training import cache, estimate, train
from specdec.training.cache import FeatureCacheWriter
from specdec.training.data import Batches, Sample
from specdec.training.features.feature_cache import FeatureCache, Form, encode, shard_path
from specdec.training.features.online import online_features
from specdec.training.loop.evaluate import expected_tau
from specdec.training.loop.log import read_log
from specdec.training.loop.parallel import Processes
from specdec.training.objectives.eagle3 import Eagle3Objective
from specdec.training.objectives.teacher import TopTokens

KINDS = ["eagle3", "eagle", "mtp-three-heads", "medusa"]


class Tokenizer:
    """As much of one as a fingerprint asks for."""

    is_fast, chat_template = False, "{{ messages }}"

    def get_vocab(self):
        return {"a": 0}


def target(seed: int = 0):
    made = tiny_target(seed=seed)
    made.tokenizer, made.name = Tokenizer(), f"tiny {seed}"
    return made


def samples(count: int = 9) -> list[Sample]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(6, 14, count)
    return [
        Sample(rng.integers(17, size=n, dtype=np.int32), rng.random(n) < 0.6, number=i) for i, n in enumerate(lengths)
    ]


def writer(folder, store="fp32", keep=None, kind="eagle3", shard_tokens=28, of=None, data=None) -> FeatureCacheWriter:
    of = of or target()
    drafter = tiny_drafter(of, draft_vocab=8, kind=kind)
    form = Form(store, keep, drafter.taps, of.config.hidden, of.config.layers)
    return FeatureCacheWriter(folder, of, drafter.vocab, data or samples(), form, shard_tokens, batch_tokens=60)


def both(tmp_path, kind="eagle3", pack=None, **how):
    """A drafter, and a batch's features: online, and from a cache."""
    of = target()
    writer(tmp_path / "cache", kind=kind, of=of, **how).write()
    drafter, opened = tiny_drafter(of, draft_vocab=8, kind=kind), FeatureCache(tmp_path / "cache")
    opened.check(of, drafter.taps, drafter.vocab, samples())
    batch = Batches(opened.samples, 80, 0, pack, lookahead=3)
    batch = batch.collate(batch.epoch(0)[0])
    drafter.documents = batch.documents
    ways = online_features, opened.features
    return drafter, batch, [way(of, batch, drafter.taps, nullcontext()) for way in ways]


@pytest.mark.matrix
@pytest.mark.parametrize("pack", [None, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_fp32_with_the_last_hidden_state_is_what_the_target_says(tmp_path, kind, pack):
    """Rows of another batch are rounded otherwise in the last bits of fp32, 24 of them, over sums of some 50 terms."""
    drafter, batch, features = both(tmp_path, kind, pack)
    text = torch.zeros_like(batch.loss_mask, dtype=torch.bool)
    for row, numbers in enumerate(batch.rows):
        text[row, : sum(len(samples()[i].ids) for i in numbers)] = True
    online, cached = (f["feats"][text] for f in features)
    torch.testing.assert_close(cached, online, rtol=0, atol=1e-5 * online.abs().max().item())
    results = [Eagle3Objective(steps=3, terms={"ce": 1.0, "tokens": 0.5})(drafter, **f)[0] for f in features]
    torch.testing.assert_close(*results, rtol=1e-5, atol=0)
    torch.testing.assert_close(*(expected_tau(drafter, **f, steps=3) for f in features), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("store", "bits"), [("fp16", 11), ("bf16", 8), ("int8", 7)])
def test_states_are_stored_to_their_precision(store, bits):
    """Floats: half a unit in the last of `bits` places of each value. int8: half of 1/127 of a row's largest value."""
    states = torch.randn(50, 3, 32, generator=torch.Generator().manual_seed(0)) * torch.tensor([0.1, 1, 300])[:, None]
    stored, scale = encode(states, store)
    error = ((stored.float() if scale is None else stored * scale) - states).abs()
    room = states.abs() * 2.0**-bits if scale is None else states.abs().amax(-1, keepdim=True) / 254 * (1 + 1e-5)
    assert (error <= room).all()
    assert error.max() > 0
    with pytest.raises(ValueError, match="do not fit fp16: give store=bf16"):
        encode(states * 1e4, "fp16")
    with pytest.raises(ValueError, match="NaN or Inf in these texts"):
        encode(states.log(), store)


@pytest.mark.parametrize(("store", "rounding"), [("fp16", 2**-11), ("bf16", 2**-8), ("int8", 1 / 127)])
def test_losses_move_by_no_more_than_the_storage_rounds(tmp_path, store, rounding):
    """A cross-entropy moves by at most twice the largest change of a logit. A logit is a product of a normed state with
    a row of the head: its change is at most |row| |state| times the relative change of the state, and the drafter's own
    state changes through fc as the features do, and through the layer: twice that again."""
    drafter, _, features = both(tmp_path, store=store)
    online, cached = (Eagle3Objective(steps=3)(drafter, **f)[1]["losses"] for f in features)
    reach = drafter.head.weight.norm(dim=-1).max() * features[0]["teacher_logits"].hidden.norm(dim=-1).max()
    assert not torch.equal(online, cached)
    assert ((online - cached).abs() <= 4 * rounding * reach).all()


def test_top_k_of_more_tokens_than_are_kept_is_refused(tmp_path):
    drafter, _, (_, cached) = both(tmp_path, keep=4)
    assert isinstance(cached["teacher_logits"], TopTokens)
    objective = Eagle3Objective(steps=2, terms={"top_k": {"weight": 1.0, "k": 8}})
    refusal = r"top_k wants the target's 8 likeliest tokens.* keeps 4: make one with keep=8"
    with pytest.raises(ValueError, match=refusal):
        objective(drafter, **cached)


@pytest.mark.parametrize("renormalise", [True, False])
def test_all_tokens_but_one_are_as_good_as_all(tmp_path, renormalise):
    """Seven of a draft vocabulary of eight: the rest is one token, so nothing is unknown."""
    drafter, _, features = both(tmp_path, keep=7)
    terms = {"kl": 1.0, "tv": 1.0, "tokens": 1.0, "choice": 1.0}
    objective = Eagle3Objective(steps=3, terms=terms, renormalise=renormalise)
    (online, metrics), (cached, others) = (objective(drafter, **f) for f in features)
    torch.testing.assert_close(cached, online, rtol=1e-5, atol=0)
    torch.testing.assert_close(others, metrics, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(*(expected_tau(drafter, **f, steps=3) for f in features), rtol=1e-5, atol=0)


def test_an_interrupted_cache_goes_on_and_damaged_shards_are_made_anew(tmp_path, monkeypatch):
    """Its second shard is interrupted."""
    assert writer(tmp_path / "whole").write() == 3
    whole = contents(tmp_path / "whole")
    cut = writer(tmp_path / "cut")
    outcomes = iter([cut.compute, Mock(side_effect=KeyboardInterrupt)])
    monkeypatch.setattr(cut, "compute", lambda data: next(outcomes)(data))
    with pytest.raises(KeyboardInterrupt):
        cut.write()
    with pytest.raises(ValueError, match=r"lacks 2 of 3 shards: specdec train cache with its settings goes on"):
        FeatureCache(tmp_path / "cut")
    assert writer(tmp_path / "cut").write() == 2
    assert contents(tmp_path / "cut") == whole
    first, second = shard_path(tmp_path / "cut", 0, 3), shard_path(tmp_path / "cut", 1, 3)
    first.write_bytes(first.read_bytes()[:500])
    content = second.read_bytes()
    second.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"features-00000.* is damaged: .*makes it anew"):
        FeatureCache(tmp_path / "cut")
    assert writer(tmp_path / "cut").write() == 2
    assert contents(tmp_path / "cut") == whole
    assert writer(tmp_path / "cut").write() == 0


def test_another_cache_is_not_mixed_in(tmp_path):
    writer(tmp_path / "a").write()
    writer(tmp_path / "b", store="fp16").write()
    with pytest.raises(ValueError, match=r"was made with store fp32, and this is fp16: give the same settings"):
        writer(tmp_path / "a", store="fp16")
    shutil.copy(shard_path(tmp_path / "b", 1, 3), shard_path(tmp_path / "a", 1, 3))
    with pytest.raises(ValueError, match="belongs to another cache"):
        FeatureCache(tmp_path / "a")
    with pytest.raises(ValueError, match="keep=8 is all of a draft vocabulary of 8 tokens: give keep=all"):
        writer(tmp_path / "c", keep=8)


def test_only_what_made_a_cache_may_use_it(tmp_path):
    of = target()
    writer(tmp_path, keep=4, of=of).write()
    opened, drafter, data = FeatureCache(tmp_path), tiny_drafter(of, draft_vocab=8), samples()
    good = {"target": of, "taps": drafter.taps, "vocab": drafter.vocab, "samples": data}
    opened.check(**good)
    of.name = "the same elsewhere"
    opened.check(**good)
    nearly = target()
    with torch.no_grad():
        nearly.blocks[1].mlp.down.weight[3, 3] += 1e-6
    retold = target()
    retold.tokenizer.chat_template = "{{ messages[0] }}"
    changed = [*data[:-1], Sample(data[-1].ids, ~data[-1].mask)]
    for change, message in (
        ({"target": nearly}, r"with target \w+ \(tiny 0, float32\), and this is \w+ \(tiny 0, float32\)"),
        ({"target": target().to(torch.bfloat16)}, "this is .*bfloat16"),
        ({"target": retold}, r"with tokenizer \w+, and this is \w+"),
        ({"taps": (0, 1, 2)}, r"with taps \[\d, \d, \d\], and this is \[0, 1, 2\]"),
        ({"vocab": tiny_drafter(of, draft_vocab=7).vocab}, r"draft vocabulary .*8 tokens.*7 tokens"),
        ({"samples": data[:-1]}, r"with data \w+ \(9 conversations\), and this is \w+ \(8 conversations\)"),
        ({"samples": changed}, r"with data \w+ \(9 conversations\), and this is \w+ \(9 conversations\)"),
    ):
        with pytest.raises(ValueError, match=message):
            opened.check(**(good | change))
    manifest = json.loads((tmp_path / "cache.json").read_text()) | {"schema": 0}
    (tmp_path / "cache.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="is of schema 0, and this reads 1"):
        FeatureCache(tmp_path)
    with pytest.raises(ValueError, match=r"is no cache of features: it has no cache.json"):
        FeatureCache(tmp_path / "nothing")


# The commands


def test_training_from_a_cache_runs_no_layer_and_gives_the_same_drafter(where, tmp_path, monkeypatch, capsys):
    """Also with another split and packed; a run that was cut goes on; the data need not be there any more."""
    cache.run(composed("cache", *where, f"out={tmp_path / 'cache'}", "store=fp32", "shard_tokens=300"))
    made = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (made["shards"], made["written"], made["conversations"]) == (made["written"], made["shards"], 60)
    train.run(composed("train", *where, f"out={tmp_path / 'online'}"))
    moved = tmp_path / "elsewhere"
    (tmp_path / "cache").rename(moved)

    ran = Mock(side_effect=AssertionError("the target ran"))
    monkeypatch.setattr("specdec.training.features.feature_cache.online_features", ran)
    stored = [where[0], f"data.cache={moved}"]
    train.run(composed("train", *stored, f"out={tmp_path / 'cached'}"))
    shutil.copytree(tmp_path / "cached", tmp_path / "cut")
    (tmp_path / "cut" / "checkpoints" / "step-00000004.pt").unlink()
    train.run(composed("train", *stored, f"out={tmp_path / 'cut'}", "resume=true"))
    train.run(composed("train", *stored, f"out={tmp_path / 'ends'}", "whole_target=false"))
    runs = "online", "cached", "cut", "ends"
    online, cached, cut, ends = (load_file(tmp_path / run / "draft" / "model.safetensors") for run in runs)
    torch.testing.assert_close(ends, cached, rtol=0, atol=0)
    torch.testing.assert_close(cached, online, rtol=0, atol=1e-4)
    torch.testing.assert_close(cached, cut, rtol=0, atol=0)
    for a, b in zip(logged(tmp_path / "online"), logged(tmp_path / "cached"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert (a["split"], a["step"], a["tokens"]) == (b["split"], b["step"], b["tokens"])
    assert logged(tmp_path / "cut") == logged(tmp_path / "cached")
    train.run(composed("train", *stored, f"out={tmp_path / 'packed'}", "data.pack=128", "data.heldout=20"))
    capsys.readouterr()
    train.run(composed("train", *stored, f"out={tmp_path / 'fewer'}", "data.limit=20"))
    assert "12 conversations" in capsys.readouterr().out  # and 8 are held out
    said = refused(capsys, train, *stored, f"out={tmp_path / 'run'}", "drafter.taps=[0,1,2]")
    assert re.search(r"was made with taps \[\d, \d, \d\], and this is \[0, 1, 2\]", said)


@pytest.mark.parametrize("keep", ["all", "4"])
def test_weights_of_chains_need_the_logits_before_an_answer_too(where, tmp_path, keep):
    kind = "drafter=pard", "drafter.layers=1", "drafter.taps=[1]", "objective=parallel", "objective.weights=teacher"
    kind = *kind, "objective.pool=all"
    cache.run(composed_alone("cache", *where, *kind, f"out={tmp_path / 'cache'}", f"keep={keep}"))
    learning = composed_alone("train", *where, *kind, f"data.cache={tmp_path / 'cache'}", f"out={tmp_path / 'run'}")
    with pytest.raises(ValueError, match="lacks some: make a cache with keep=all and the last hidden state among"):
        train.run(learning)


@pytest.mark.matrix
@pytest.mark.parametrize("keep", ["all", "4", "64"])
@pytest.mark.parametrize("store", ["fp32", "bf16", "int8"])
def test_the_estimate_of_a_cache_is_its_size(where, tmp_path, store, keep):
    cache.run(composed("cache", *where, f"out={tmp_path}", f"store={store}", f"keep={keep}"))
    run = train.assemble(composed("train", *where, "out=runs/x"), Processes())
    run_samples = run.data.samples + run.heldout.samples
    form = Form(store, None if keep == "all" else int(keep), run.drafter.taps, 48, 3)
    written = sum(p.stat().st_size for p in tmp_path.glob("*.safetensors"))
    assert form.bytes(run_samples, shards=1) == pytest.approx(written, rel=0.02)


def test_an_estimate_counts_what_the_run_does(where, tmp_path, capsys):
    settings = *where, "trainer.accumulate=2", "trainer.ema=0.9"
    estimate.run(composed("train", *settings, f"out={tmp_path / 'x'}"))
    assert not (tmp_path / "x").exists()
    made = json.loads(capsys.readouterr().out.splitlines()[-1])
    train.run(composed("train", *settings, f"out={tmp_path / 'run'}"))
    last = read_log(tmp_path / "run" / "log.jsonl")[-1]
    assert (made["steps"], made["tokens"]) == (last["step"], last["tokens"])
    written = (tmp_path / "run" / "checkpoints" / "step-00000004.pt").stat().st_size
    assert made["checkpoint"] == pytest.approx(written, rel=0.05)
    assert made["peak_from_shapes"] == sum(made["memory"].values())
    assert made["seconds"] > 0


def test_what_does_not_fit_is_warned_of():
    cache_sizes = [{"store": "fp32", "keep": "all", "bytes": 2**31}, {"store": "int8", "keep": "all", "bytes": 2**20}]
    report = {"run_disk": 2**21, "free_disk": 2**20, "cache": cache_sizes, "peak_measured": None}
    report |= {"peak_from_shapes": 2**31, "free_memory": 2**30, "on_policy": True}
    assert estimate.warnings(report) == [
        "the rollouts of data.on_policy are not in these figures: neither their text nor their time",
        "the run's checkpoints take 2.0 MiB, and the disk has 1.0 MiB free",
        "of the caches fp32/all do not fit on the disk, which has 1.0 MiB free",
        "a step takes 2.0 GiB of memory, and 1.0 GiB are free",
    ]
    assert estimate.warnings(report | {"run_disk": 0, "cache": [], "free_memory": None, "on_policy": False}) == []
