"""Rows of a batch: each as if it were alone, with its own settings, penalties, stop strings and log-probabilities."""

import random
from types import SimpleNamespace

import pytest
import torch
from helpers import assert_same_greedy_text, finish, pvalue_of_tokens_2_and_3, save_hf, tiny_drafter, tiny_target
from tape import Tape

from specdec import Engine, load_target
from specdec.api import DEMO_TARGET, generate
from specdec.drafters.draft_model import DraftModel
from specdec.ops.likely import top_logprobs
from specdec.sampling.filters import filtered_probs, sample
from specdec.sampling.noise import Noise, hashes_of
from specdec.structs import Sampling, SamplingBatch
from specdec.text import StopStrings, TextStream
from specdec.trees import Chain, DynamicTree, SampledTree
from specdec.verify import VERIFIERS, make_verifier

CPU = torch.device("cpu")
HEAVY = Sampling(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3)
TREES = {"chain": Chain(4), "dynamic": DynamicTree(3, 3, 10), "sampled": SampledTree((3, 2, 1))}


def ragged(rows: int) -> tuple[list[list[int]], list[int]]:
    """Prompts of 1 to 12 tokens, and limits of 1 to 25 new ones."""
    r = random.Random(rows)
    prompts = [[r.randrange(1, 17) for _ in range(r.randint(1, 12))] for _ in range(rows)]
    return prompts, [r.randint(1, 25) for _ in range(rows)]


# Settings of each row


FILTERED = Sampling(0.8, top_k=6, top_p=0.9, min_p=0.05)
SETTINGS = [Sampling(), FILTERED, Sampling(1.0, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.7)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_one_table_of_settings_filters_as_each_setting_does(dtype, request):
    torch.set_default_dtype(dtype)
    request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
    g = torch.Generator().manual_seed(0)
    settings = [*SETTINGS, Sampling(0.5, top_k=3), Sampling(1.5, top_p=0.3), Sampling(0.9, min_p=0.3), Sampling(1.0)]
    settings.append(Sampling(1.0, top_k=500))  # more than there are
    rows = Noise([(0, row) for row in range(len(settings))], hashes_of(torch.arange(29)))
    for shape in ((1, 29), (4, 29)):
        logits = torch.randn(len(settings), *shape, generator=g, dtype=torch.float32) * 3
        batched = filtered_probs(logits, SamplingBatch(settings, CPU))
        alone = torch.stack([filtered_probs(x, s) for x, s in zip(logits, settings, strict=True)])
        assert torch.equal(batched > 0, alone > 0)
        torch.testing.assert_close(batched, alone, rtol=0, atol=1e-6)
        drawn = sample(logits, SamplingBatch(settings, CPU), rows.after(torch.zeros(len(settings)).long(), shape[0]))
        assert drawn.shape == logits.shape[:-1]
        assert torch.equal(drawn[0], logits[0].argmax(-1)), "the first row is greedy"
        assert (batched.gather(-1, drawn[..., None]) > 0).all()


@pytest.mark.parametrize("verifier", [name for name in VERIFIERS if make_verifier(name).lossless])
def test_mixed_rows_follow_their_own_laws(verifier):
    """One batch holds 700 greedy, filtered and penalised rows each. Greedy rows are plain text; the others follow the
    exact joint distribution of tokens 2 and 3."""
    target, rule, kinds = tiny_target(vocab=11), VERIFIERS[verifier](), len(SETTINGS)
    tree = SampledTree((1, 1, 1) if rule.chains_only else (3, 2, 1)) if rule.needs_q else DynamicTree(3, 3, 10)
    engine = Engine(target, tiny_drafter(target, draft_vocab=8), tree, rule)
    rows = engine.generate([[3, 1, 4]] * 700 * kinds, max_new_tokens=3, sampling=SETTINGS * 700, seed=3).rows
    plain = Engine(target).generate([[3, 1, 4]], max_new_tokens=3).rows[0].tokens
    assert all(row.tokens == plain for row in rows[::kinds])
    for kind in range(1, kinds):
        assert rows[kind].sampling == SETTINGS[kind]
        own = SimpleNamespace(rows=rows[kind::kinds])
        assert pvalue_of_tokens_2_and_3(target, [3, 1, 4], SETTINGS[kind], own) > 1e-3


def test_each_row_needs_its_own():
    for how, message in (
        ({"sampling": [Sampling()]}, "sampling has 1 values, and there are 2 prompts"),
        ({"max_new_tokens": [3, 4, 5]}, "max_new_tokens has 3 values, and there are 2 prompts"),
        ({"max_new_tokens": [3, 0]}, "max_new_tokens must be at least 1, got 0"),
        ({"stop": [None]}, "stop has 1 values, and there are 2 prompts"),
    ):
        with pytest.raises(ValueError, match=message):
            Engine(tiny_target()).generate([[1], [2]], **how)


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])  # a native target, and one through the adapter
def test_greedy_text_under_a_repetition_penalty_is_that_of_transformers(family, tmp_path):
    model = save_hf(tmp_path, family, head=8.0)
    target = load_target(tmp_path, tokenizer=False)
    texts = [assert_same_greedy_text(model, target, new=40, penalty=penalty) for penalty in (1.0, 1.25)]
    assert texts[0] != texts[1]


# Stop strings


@pytest.fixture(scope="module")
def target(target_path):
    return load_target(target_path)


def test_text_ends_before_a_stop_string_and_tokens_with_it(target):
    text, tokenizer = "Café 日本語 🎉 end", target.tokenizer
    ids, decode = tokenizer(text)["input_ids"], tokenizer.decode
    for stops, shown in (
        (["日本語"], "Café "),
        (["本"], "Café 日"),
        (["🎉"], "Café 日本語 "),
        (["é 日"], "Caf"),
        (["語 🎉 end", "nowhere"], "Café 日本"),
        (["never", "Cafés"], text),
        (["end of it"], text),  # held back as its beginning until nothing more comes
        (["本語", "日本語"], "Café "),  # both are complete with one token: the text ends before the earlier
    ):
        stream, watch, said, ends = TextStream(tokenizer, stops), StopStrings(tokenizer, stops), "", []
        for token in ids:
            said += stream.feed([token])
            ends.append(watch.add(token))
            assert ends[-1] == stream.stopped
        assert said + stream.end() == shown
        assert any(ends) == (shown != text)
        if any(ends):
            count = ends.index(True) + 1
            assert any(stop in decode(ids[:count]) for stop in stops)
            assert not any(stop in decode(ids[: count - 1]) for stop in stops)


@pytest.mark.parametrize("drafted", range(5))
def test_a_stop_within_an_accepted_path_ends_the_row_there(drafted):
    """The drafter is the target, so every round accepts all four tokens: stop strings end at each of their places."""
    target, prompts = load_target(DEMO_TARGET), ["What is a tree?", "Write a poem."]
    decode = target.tokenizer.decode
    plain = generate(target, prompts, max_new_tokens=9).rows
    stop = [[decode(row.tokens[: 4 + drafted])[-4:]] for row in plain]
    how = {"max_new_tokens": 16, "stop": stop}
    fast = generate(target, prompts, DraftModel(target), tree=Chain(4), **how)
    slow = generate(target, prompts, **how)
    assert [(row.tokens, row.finish) for row in fast.rows] == [(row.tokens, row.finish) for row in slow.rows]
    assert fast.text == slow.text
    for row, text, (own,) in zip(fast.rows, fast.text, stop, strict=True):
        assert row.finish == "stop"
        assert own in decode(row.tokens)
        assert own not in decode(row.tokens[:-1])
        assert text == decode(row.tokens)[: decode(row.tokens).index(own)]


class After:
    """Stops a row at its n-th token."""

    def __init__(self, n: int):
        self.left = n

    def add(self, token: int) -> bool:
        self.left -= 1
        return self.left == 0


def test_what_comes_first_ends_the_row():
    """On the same token eos goes before a stop, and a stop before the limit."""
    engine = Engine(tiny_target())
    tokens = engine.generate([[3, 5]], max_new_tokens=9).rows[0].tokens
    eos = frozenset([next(t for t in tokens if tokens.index(t) >= 2)])
    first = tokens.index(*eos) + 1
    for at, limit, ends, expected in (
        (first, 9, eos, "eos"),
        (first - 1, 9, eos, "stop"),
        (4, 4, frozenset(), "stop"),
        (5, 4, frozenset(), "length"),
    ):
        row = engine.generate([[3, 5]], max_new_tokens=limit, eos=ends, stop=[After(at)]).rows[0]
        assert row.finish == expected
        assert len(row.tokens) == min(at, limit, first if ends else 9)


@pytest.mark.parametrize("stop", ["", ["a", ""], [["a"], [3]]])
def test_what_is_no_stop_string(target, stop):
    with pytest.raises(ValueError, match="a stop string needs at least one character"):
        generate(target, ["x", "y"], stop=stop)


# Log-probabilities


@pytest.mark.parametrize("sampling", [Sampling(), HEAVY, Sampling(0.8, top_k=5)], ids=["greedy", "penalties", "drawn"])
@torch.inference_mode()
def test_logprobs_are_the_target_s_own(sampling):
    """Before penalties, temperature and filters: those of one forward over the whole text, within rounding."""
    target, (prompts, limits) = tiny_target(), ragged(5)
    for engine in [Engine(target), *(Engine(target, tiny_drafter(target), tree) for tree in TREES.values())]:
        rows = engine.generate(prompts, max_new_tokens=limits, sampling=sampling, logprobs=True).rows
        for row in rows:
            logits, _ = target(torch.tensor([row.prompt + row.tokens]), None)
            own = logits[0, len(row.prompt) - 1 : -1].log_softmax(-1).gather(1, torch.tensor(row.tokens)[:, None])
            torch.testing.assert_close(torch.tensor(row.logprobs), own[:, 0], rtol=0, atol=1e-5)
        without = engine.generate(prompts, max_new_tokens=limits, sampling=sampling).rows
        assert [row.tokens for row in without] == [row.tokens for row in rows]
        assert all(row.logprobs is None for row in without)


@pytest.mark.parametrize(
    "how", [{"overlap": False}, {"overlap": True}, {"graphs": Tape()}], ids=["at once", "overlapped", "recorded"]
)
@torch.inference_mode()
def test_the_likeliest_tokens_in_the_place_of_each(how):
    """Of the target's own softmax, best first; as many as each row asks for."""
    target, wanted = tiny_target(), (3, 0, 20)
    engine = Engine(target, tiny_drafter(target), Chain(3), **how)
    engine.reserve(3, 20)
    rows = [
        engine.add([3, 5, 7][: 1 + i], max_new_tokens=9, sampling=HEAVY, seed=(0, i), eos=frozenset(), top_logprobs=k)
        for i, k in enumerate(wanted)
    ]
    finish(engine)
    assert rows[1].logprobs is None
    assert rows[1].likely == []
    for row, k in ((rows[0], 3), (rows[2], 17)):  # there are 17 tokens
        logits, _ = target(torch.tensor([row.prompt + row.tokens]), None)
        values, ids = top_logprobs(logits[0, len(row.prompt) - 1 : -1], k)
        assert [[token for token, _ in place] for place in row.likely] == ids.tolist()
        reported = torch.tensor([[x for _, x in place] for place in row.likely])
        torch.testing.assert_close(reported, values, rtol=0, atol=1e-5)
        own = [dict(place)[token] for place, token in zip(row.likely, row.tokens, strict=True) if token in dict(place)]
        assert own == [x for x, p, t in zip(row.logprobs, row.likely, row.tokens, strict=True) if t in dict(p)]
    with pytest.raises(ValueError, match="top_logprobs must be from 0 to 20, got 21"):
        engine.add([1], top_logprobs=21)


# Half precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", VERIFIERS)
def test_half_precision_decodes(name, dtype):
    """Equal text is not promised here. Every row ends, with tokens of the vocabulary."""
    target, rule = tiny_target().to(dtype), make_verifier(name)
    tree = SampledTree((1, 1, 1) if rule.chains_only else (3, 2, 1))
    engine = Engine(target, tiny_drafter(target).to(dtype), tree, rule)
    for sampling in (Sampling(), Sampling(temperature=1.0)):
        rows = engine.generate([[3, 5, 7], [1]], max_new_tokens=20, sampling=sampling, eos=frozenset()).rows
        assert all(len(row.tokens) == 20 and 0 <= min(row.tokens) <= max(row.tokens) < 17 for row in rows)
