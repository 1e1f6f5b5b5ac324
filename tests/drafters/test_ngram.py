"""The n-gram drafter against its definition in plain Python, and against transformers' prompt lookup."""

import math

import pytest
import torch
from helpers import tiny_target
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from specdec.children import LIKELIEST
from specdec.drafters import ngram
from specdec.drafters.formats import load_drafter
from specdec.drafters.vocab import DraftVocab
from specdec.trees import Chain

V = 5


def match_length(text: list[int], drafted: list[int], place: int, cap: int) -> int:
    """Longest common suffix of text + drafted and text[: place + 1], counting at most `cap` tokens of the text."""
    whole, n = text + drafted, 0
    while n <= place and n < len(drafted) + cap and text[place - n] == whole[-1 - n]:
        n += 1
    return n


def distribution(text: list[int], drafted: list[int], mode: str, cap: int, least: int):
    """Probabilities [V] of the next token, by the definition in the drafter's docstring."""
    weights: list[list[float]] = [[] for _ in range(V)]
    for place in range(len(text) - 1):
        n = match_length(text, drafted, place, cap)
        if n >= least:
            earlier = place / len(text) if mode == "lookup" else 0
            weights[text[place + 1]].append(ngram.BASE ** (n - earlier))
    total = [1 / V + ((max if mode == "lookup" else sum)(w) if w else 0.0) for w in weights]
    return torch.tensor([t / sum(total) for t in total])


def random_texts(seed: int, lengths: list[int]) -> list[list[int]]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(3, (n,), generator=g).tolist() for n in lengths]


def absorb(drafter, texts: list[list[int]]):
    """Prefill ragged texts, the last token of each being the root."""
    longest = max(map(len, texts))
    padded = torch.tensor([t + [4] * (longest - len(t)) for t in texts])
    lens = torch.tensor([len(t) for t in texts])
    drafter.reset(len(texts), longest + 20)
    return drafter.admit(0, padded[:, 0], None, padded[:, 1:], lens - 1)


@pytest.mark.parametrize("mode", ["lookup", "suffix"])
@pytest.mark.parametrize(("cap", "least"), [(1, 1), (3, 1), (4, 2), (30, 1)])
def test_distribution_is_the_definition(mode, cap, least):
    """At the root and along drafted paths, for several nodes at once, in rows of different lengths; then once more
    after a round in which one row stood still."""
    drafter = ngram.create(tiny_target(V), mode=mode, max_ngram=cap, min_ngram=least)
    texts = random_texts(0, [40, 2, 17])
    state = absorb(drafter, texts)
    committed = torch.tensor([[0, 1, 2, 0], [2, 2, 1, 1], [1, 0, 0, 2]])
    for counts in ([3, 0, 2], [1, 4, 4]):
        paths = [[[a, b] for a, b in ((0, 1), (1, 1), (2, 0))] for _ in texts]
        states = [drafter.root(state)]
        for level in (1, 2):
            tokens = torch.tensor([[path[level - 1] for path in row] for row in paths])
            hidden = states[-1].hidden.expand(-1, 3, -1)
            states.append(drafter.step(tokens, hidden, level, torch.ones(3, 3, 3 * level, dtype=torch.bool)))
        for row, text in enumerate(texts):
            for level, at in enumerate(states):
                for node in range(at.logits.shape[1]):
                    expected = distribution(text, paths[row][node][:level], mode, cap, least)
                    torch.testing.assert_close(at.logits[row, node].softmax(-1), expected)
        texts = [text + committed[row, : counts[row]].tolist() for row, text in enumerate(texts)]
        state = drafter.extend(None, committed, torch.tensor(counts), max(map(len, texts)) + 1)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("cap", [1, 2, 3])
def test_a_chain_is_transformers_prompt_lookup(seed, cap):
    """Its candidates end where the text ends; ours go on."""
    (text,) = random_texts(seed, [25])
    steps = 6
    peer = PromptLookupCandidateGenerator(num_output_tokens=steps, max_matching_ngram_size=cap, max_length=1000)
    wanted = peer.get_candidates(torch.tensor([text]))[0][0, len(text) :].tolist()
    drafter = ngram.create(tiny_target(V), mode="lookup", max_ngram=cap)
    tree = Chain(steps).grow(drafter, torch.tensor(text[-1:]), absorb(drafter, [text]))
    assert wanted
    assert tree.tokens[0, 1 : 1 + len(wanted)].tolist() == wanted


@pytest.mark.parametrize("vocab", [None, [3, 1]], ids=["all tokens", "some tokens"])
@pytest.mark.parametrize("mode", ["lookup", "suffix"])
@pytest.mark.parametrize(("cap", "least"), [(1, 1), (3, 1), (4, 2), (16, 1)])
def test_on_the_host_it_is_what_operators_compute(monkeypatch, mode, cap, least, vocab):
    """Rows of different lengths, one of them too short for a match, in a prefill and after a round of some tokens."""
    ids = None if vocab is None else DraftVocab(V, torch.tensor(vocab))
    for seed in range(10):
        texts = [*random_texts(seed, [40, 2, 17, 80]), [0, 1, 2, 3]]
        seen = []
        for host in (True, False):
            monkeypatch.setattr(ngram.NGram, "_on_host", lambda _, host=host: host)
            drafter = ngram.create(tiny_target(V), mode=mode, max_ngram=cap, min_ngram=least, vocab=ids)
            more, n = torch.tensor([[0, 1], [2, 2], [1, 0], [0, 0], [4, 4]]), torch.tensor([2, 0, 1, 2, 1])
            seen.append([])
            for absorbed in (absorb(drafter, texts), None):
                state = absorbed or drafter.extend(None, more, n, 82)
                seen[-1] += [drafter.root(state).hidden.clone(), state.levels, *drafter.chain(state, 6, LIKELIEST)]
        for host, operators in zip(*seen, strict=True):
            torch.testing.assert_close(host, operators)


def test_levels_grow_with_the_match():
    """Nothing after one token, and `reach` levels for each further one; or whole trees after any match."""
    texts = [[0, 1, 2, 3], [0, 1, 0], [0, 1, 2, 0, 1], [0, 1, 2, 3, 0, 1, 2], [4, 4]]
    for settings, expected in (
        ({}, [0, 0, 3, 6, 0]),
        ({"reach": 2}, [0, 0, 2, 4, 0]),
        ({"max_ngram": 2}, [0, 0, 3, 3, 0]),
        ({"min_ngram": 3}, [0, 0, 0, 6, 0]),
        ({"reach": None}, [0, ngram.ALL, ngram.ALL, ngram.ALL, ngram.ALL]),
        ({"reach": None, "min_ngram": 2}, [0, 0, ngram.ALL, ngram.ALL, 0]),
    ):
        assert absorb(ngram.create(tiny_target(V), **settings), texts).levels.tolist() == expected


def test_long_matches_neither_overflow_nor_lose_the_rest():
    drafter = ngram.create(tiny_target(V), mode="suffix", max_ngram=300)
    state = drafter.root(absorb(drafter, [[0, 1] * 400]))
    assert state.logits.isfinite().all()
    assert state.logits.argmax() == 0
    assert not math.isnan(state.logits.softmax(-1).sum())


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"mode": "guess"}, "mode must be one of lookup, suffix, got 'guess'"),
        ({"min_ngram": 0}, "min_ngram must lie between 1 and max_ngram, got 0 and 16"),
        ({"min_ngram": 4, "max_ngram": 3}, "got 4 and 3"),
        ({"reach": 0}, "reach must be at least 1, or null for whole trees, got 0"),
    ],
)
def test_nonsense_is_refused(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        ngram.create(tiny_target(V), **settings)


def test_names():
    target = tiny_target(V)
    assert load_drafter("ngram", target).mode == "lookup"
    assert load_drafter("ngram:suffix", target).mode == "suffix"
    with pytest.raises(ValueError, match="mode must be one of lookup, suffix, got 'x'"):
        load_drafter("ngram:x", target)
